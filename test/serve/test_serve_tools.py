"""Tools, reasoning and several choices. A token mask makes the model write a given text."""

import json
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy
import openai
import pytest
import served
import small_llm
from executorch_mlx.llm import LLM
from executorch_mlx.llm.tokenizer import Tokenizer
from executorch_mlx.serve import Settings, create_app
from executorch_mlx.serve.answer import Offsets
from executorch_mlx.serve.chat_request import AssistantMessage, template_message
from served import NAME

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
# A template like those of Qwen: it supports tools and reasoning.
TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}
{%- endfor %}{% if reasoning_effort %}[effort {{ reasoning_effort }}]{% endif %}[assistant]{% if think %}<think>{% endif %}{# </think> #}"""


class Scripted:
    """A server whose model writes `text`, at most `limit` tokens of it."""

    def __init__(self, llm: LLM, url: str):
        self.llm, self.url, self.text, self.limit, self.prompts = llm, url, None, None, []
        self._generate = llm.generate
        llm.generate = self.generate

    def generate(self, ids, **options):
        self.prompts.append(self.llm.tokenizer.decode(ids))
        if self.text is not None:
            script = [*self.llm.encode(self.text, special=False), small_llm.EOS]
            options |= {"allowed_tokens": lambda answer: one_bit(script[len(answer)])}
            options["max_new_tokens"] = self.limit
        return self._generate(ids, **options)


def one_bit(token: int) -> numpy.ndarray:
    mask = numpy.zeros(small_llm.VOCABULARY // 32, numpy.uint32)
    mask[token // 32] = 1 << token % 32
    return mask.view(numpy.int32)


@contextmanager
def scripted(program, template: str, special: tuple[str, ...] = ()):
    llm = LLM.load(program)
    config = {"eos_token": "</s>", "additional_special_tokens": list(special)}
    llm.tokenizer = Tokenizer(with_tokens(llm, special), config, template)
    settings = Settings(host="127.0.0.1", grace_seconds=0)
    with served.listening(create_app(llm, name=NAME, settings=settings), settings) as url:
        yield Scripted(llm, url)


def with_tokens(llm, names: tuple[str, ...]) -> str:
    """The tokenizer of the model, as JSON, in which the tokens from 500 on have other names."""
    vocabulary = json.loads(llm.tokenizer.backend.to_str())
    for id, name in enumerate(names, 500):
        old = llm.tokenizer.backend.id_to_token(id)
        vocabulary["model"]["vocab"][name] = vocabulary["model"]["vocab"].pop(old)
        merges = vocabulary["model"]["merges"]
        vocabulary["model"]["merges"] = [pair for pair in merges if old not in (*pair, "".join(pair))]
    return json.dumps(vocabulary)


def test_reasoning_of_other_servers():
    message = AssistantMessage(role="assistant", content=None, reasoning="hm")
    assert template_message(message) == {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.fixture(scope="module")
def server(chat_program):
    with scripted(chat_program, TEMPLATE) as server:
        yield server


@pytest.fixture
def says(server):
    """A function that sets the text that the model writes."""

    def say(text: str | None) -> None:
        server.text = text

    yield say
    server.text = server.limit = None
    server.prompts.clear()


def chat(client, **fields):
    return client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, "tools": TOOLS, "seed": 1} | fields)


def test_call_is_read_from_the_answer(client, server, says):
    says(f"Let me look.\n{CALL}\n{CALL}")
    (choice,) = chat(client).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look.\n"
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"city": "Oslo", "days": 2}
    ] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert '"name": "get_weather"' in server.prompts[0] and "<tools>" in server.prompts[0]
    (choice,) = chat(client, parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    (choice,) = chat(client, tool_choice="none").choices
    assert choice.message.tool_calls is None and CALL in choice.message.content and "<tools>" not in server.prompts[-1]


def test_usage_ends_with_the_only_call(client, server, says, monkeypatch):
    """However many tokens the engine has generated by then. Here, it has generated all."""
    text, generate = f"{CALL} More text.", server.llm.generate
    says(text)

    def generate_all(*args, **options):
        generation = generate(*args, **options)
        while generation.metrics.generated_tokens <= len(server.llm.encode(text, special=False)):
            time.sleep(0.001)
        return generation

    monkeypatch.setattr(server.llm, "generate", generate_all)
    usage = chat(client, parallel_tool_calls=False).usage
    assert usage.completion_tokens == len(server.llm.encode(CALL.removesuffix("\n</tool_call>"), special=False))


def test_calls_of_a_stream_come_in_pieces(client, says):
    says(f"Hi {CALL}\n{CALL.replace('Oslo', 'Bergen')}")
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True)]
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    whole = chat(client).choices[0].message
    for index, call in enumerate(whole.tool_calls):
        first, *others = [piece for piece in pieces if piece.index == index]
        assert first.id and (first.type, first.function.name) == ("function", "get_weather")
        assert first.function.arguments == "" and len(others) > 3
        assert {(piece.id, piece.type, piece.function.name) for piece in others} == {(None, None, None)}
        assert "".join(piece.function.arguments for piece in others) == call.function.arguments
    assert len(whole.tool_calls) == 2 and [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Hi " and chunks[-1].finish_reason == "tool_calls"


def test_streaming_helper_of_openai(client, says):
    """The helper parses the arguments of a call while they arrive."""
    says(f"{CALL}{CALL}")
    tools = [{"type": "function", "function": WEATHER | {"strict": True}}]
    options = {"tools": tools, "parallel_tool_calls": False}
    with client.chat.completions.stream(model=NAME, messages=MESSAGES, **options) as stream:
        kinds = [event.type for event in stream]
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls
    assert call.function.parsed_arguments == {"city": "Oslo", "days": 2} and choice.finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert kinds.count("tool_calls.function.arguments.done") == 1


def test_call_that_is_cut_off_is_no_valid_json(client, server, says):
    says(CALL)
    server.limit = len(server.llm.encode(CALL, special=False)) - 20
    choice = chat(client).choices[0]
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True)]
    (call,) = choice.message.tool_calls
    pieces = [piece.function.arguments for chunk in chunks for piece in chunk.delta.tool_calls or []]
    assert "".join(pieces) == call.function.arguments and call.function.arguments.startswith('{"city"')
    assert choice.finish_reason == chunks[-1].finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


def test_marks_of_messages_and_functions_have_no_effect(client, server, says):
    """guardrails repeats `required` beside the schema; LiteLLM marks what the API of Anthropic should cache."""
    says("Hi")
    cached = {"cache_control": {"type": "ephemeral"}}
    for extra, mark in (({}, {}), ({"required": ["city"]}, {}), (cached, cached)):
        messages = [{"role": "system", "content": [{"type": "text", "text": "Hi", **mark}]} | mark, MESSAGES[0] | mark]
        chat(client, messages=messages, tools=[{"type": "function", "function": WEATHER | extra} | mark])
    assert len({*server.prompts[-3:]}) == 1


def test_results_of_calls_are_messages(client, server, says):
    says(CALL)
    message = chat(client).choices[0].message
    says("Rain.")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    sent = message.model_dump()
    sent["tool_calls"][0]["function"]["parsed_arguments"] = {"city": "Oslo"}  # as after parse() of the openai package
    answer = chat(client, messages=[*MESSAGES, sent, result])
    assert answer.choices[0].message.content == "Rain." and answer.choices[0].finish_reason == "stop"
    # The template got the arguments as a mapping.
    assert '<tool_call>{"city": "Oslo", "days": 2}</tool_call>[tool]rain' in server.prompts[-1]


def call_that_returns(arguments: str) -> dict[str, tuple[str, dict]]:
    """For each path, the field with the arguments of an earlier call, and the body of the request."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    item = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": arguments}
    field = "messages.1.tool_calls.0.function.arguments"
    return {
        "/v1/chat/completions": (field, {"model": NAME, "messages": messages, "max_tokens": 1}),
        "/v1/responses": ("input.1.arguments", {"model": NAME, "input": [*MESSAGES, item], "max_output_tokens": 1}),
        "/tokenize": (field, {"model": NAME, "messages": messages}),
    }


def test_arguments_may_have_lone_surrogates(server):
    """A model that is cut off in an escaped emoji writes one. The client then sends it back."""
    import httpx

    arguments = r'{"a\udc00": ["\ud83d", "\ud83d\ude00", "\\ud83d"]}'
    for path, (_, body) in call_that_returns(arguments).items():
        response = httpx.post(f"{server.url}{path}", json=body)
        assert response.status_code == 200
        ids = response.json().get("tokens")
        prompt = server.prompts.pop() if ids is None else server.llm.tokenizer.decode(ids)
        assert '<tool_call>{"a\ufffd": ["\ufffd", "😀", "\\\\ud83d"]}</tool_call>' in prompt


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 102 + "]" * 102, '{"a":' * 101 + "1" + "}" * 101])
def test_deeply_nested_arguments_return_400(server, arguments):
    import httpx

    for path, (field, body) in call_that_returns(arguments).items():
        response = httpx.post(f"{server.url}{path}", json=body)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == field
        assert error["message"] == f"{field}: nested too deeply: expected at most 100 levels"
    for path, (_, body) in call_that_returns("[" * 101 + "]" * 101).items():
        assert httpx.post(f"{server.url}{path}", json=body).status_code == 200


def test_forced_calls_follow_the_schema(client):
    pytest.importorskip("xgrammar")
    named = {"type": "function", "function": {"name": "get_weather"}}
    untyped = {"function": {"name": "get_weather"}}  # from huggingface_hub
    for seed, choice in enumerate(["required", "required", "required", named, untyped]):
        answer = chat(client, tool_choice=choice, seed=seed, max_tokens=150).choices[0]
        assert answer.finish_reason == "tool_calls" and not answer.message.content
        for call in answer.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name in (("get_weather", "now") if choice == "required" else ("get_weather",))
            if call.function.name == "get_weather":
                assert set(arguments) == {"city", "days"} and 1 <= arguments["days"] <= 9
    several = [chat(client, tool_choice="required", seed=seed, max_tokens=400).choices[0] for seed in range(2)]
    assert max(len(choice.message.tool_calls) for choice in several) > 1  # with a line feed between them
    for options in ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": named}):
        for one in chat(client, **options, seed=1, n=4, max_tokens=400).choices:
            assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"


def test_further_call_begins_only_if_it_fits(client):
    pytest.importorskip("xgrammar")
    values = {f"value_{i}": {"type": "integer"} for i in range(6)}
    parameters = {"type": "object", "properties": values, "required": [*values]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for length in (120, 150):
        for choice in chat(client, tools=[tool], tool_choice="required", seed=2, n=12, max_tokens=length).choices:
            assert choice.finish_reason == "tool_calls", (length, choice.message.tool_calls)


def test_allowed_tools_are_the_only_ones(client, server):
    pytest.importorskip("xgrammar")
    for mode in ("required", "auto"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        message = chat(client, tool_choice=choice, max_tokens=60).choices[0].message
        assert '"name": "now"' in server.prompts[-1] and "get_weather" not in server.prompts[-1]
        assert mode == "auto" or {call.function.name for call in message.tool_calls} == {"now"}


def test_effort_of_no_reasoning():
    from executorch_mlx.serve.errors import ApiError
    from executorch_mlx.serve.start import _effort_options

    def options(template: str, effort: str, has_reasoning: bool = True) -> dict:
        format = SimpleNamespace(reasoning=("<think>",) if has_reasoning else ())
        return _effort_options(SimpleNamespace(template=template, format=format, name="m"), effort)

    assert options("{{ reasoning_effort }}{{ enable_thinking }}", "none") == {"reasoning_effort": "none"}
    assert options("{{ enable_thinking }}", "none") == {"enable_thinking": False}
    assert options("", "none", has_reasoning=False) == {}
    for template, effort in (("", "none"), ("{{ enable_thinking }}", "low")):
        with pytest.raises(ApiError, match="has no use for it"):
            options(template, effort)


def test_reasoning_effort_reaches_the_template(client, server, says):
    says("Rain.")
    assert chat(client, reasoning_effort="low").choices[0].message.content == "Rain."
    assert server.prompts[-1].endswith("[effort low][assistant]")
    chat(client, reasoning_effort="low", extra_body={"chat_template_kwargs": {"reasoning_effort": "max"}})
    assert server.prompts[-1].endswith("[effort max][assistant]")


def test_strict_functions_constrain_calls_and_not_text(client):
    pytest.importorskip("xgrammar")
    strict = [{"type": "function", "function": WEATHER | {"strict": True}}]
    answers = [chat(client, tools=strict, max_tokens=20, seed=seed) for seed in (0, 5)]
    assert [answer.usage.completion_tokens for answer in answers] == [20, 20]  # nothing ends the text early
    assert "\n" in answers[0].choices[0].message.content


def test_calls_whose_tags_are_special_tokens_follow_the_schema(chat_program):
    pytest.importorskip("xgrammar")
    strict = [{"type": "function", "function": WEATHER | {"strict": True}}]
    begin = {"logit_bias": {"500": 5}}  # <tool_call>, after some text
    with scripted(chat_program, TEMPLATE, ("<tool_call>", "</tool_call>")) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            for fields in ({"tool_choice": "required"}, begin):
                message = chat(client, tools=strict, max_tokens=200, **fields).choices[0].message
                arguments = json.loads(message.tool_calls[0].function.arguments)
                assert set(arguments) == {"city", "days"} and 1 <= arguments["days"] <= 9


def test_tools_and_a_schema(client):
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for seed in range(3):
        message = chat(client, response_format=response_format, seed=seed, max_tokens=150).choices[0].message
        assert message.tool_calls or isinstance(json.loads(message.content)["ok"], bool)


@pytest.mark.parametrize(
    "field, value",
    [
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tools", [{"type": "function", "function": WEATHER | {"strict": True}}]),
    ],
)
def test_ignore_eos_with_a_grammar_returns_400(client, field, value):
    pytest.importorskip("xgrammar")
    with pytest.raises(openai.BadRequestError, match=f"ignore_eos: got true with {field}, .* false") as caught:
        chat(client, **{field: value}, max_tokens=40, extra_body={"ignore_eos": True})
    assert caught.value.param == "ignore_eos"
    assert chat(client, max_tokens=4, extra_body={"ignore_eos": True}).usage.completion_tokens == 4


def test_answer_with_a_name_is_no_call(chat_program):
    """The calls of Llama are JSON objects without a tag, with the member `name` in front."""
    pytest.importorskip("xgrammar")
    person = {"name": {"enum": ["Ada", "now"]}, "age": {"type": "integer", "maximum": 9}}
    schema = {"type": "object", "properties": person, "required": [*person]}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with scripted(chat_program, small_llm.TEMPLATE + "{# <|python_tag|> #}") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            choices = chat(client, response_format=response_format, n=8, max_tokens=150).choices
            for message in (choice.message for choice in choices):
                if message.tool_calls:
                    assert {call.function.name for call in message.tool_calls} <= {"now", "get_weather"}
                else:
                    assert json.loads(message.content).keys() == person.keys()
            assert not all(choice.message.tool_calls for choice in choices)
            server.text = '{"name": "now", "age": 5}'
            (choice,) = chat(client, response_format=response_format).choices
            assert choice.message.content == server.text and choice.finish_reason == "stop"


def test_reasoning_is_split_off(client, says):
    says("<think>\nIt rains.\n</think>\n\nRain.")
    answer = chat(client, tools=[])
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("It rains.\n", "Rain.")
    assert 3 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    says("It rains.</think>Rain.")  # the prompt ends with <think>
    message = chat(client, tools=[], extra_body={"chat_template_kwargs": {"think": True}}).choices[0].message
    assert (message.reasoning_content, message.content) == ("It rains.", "Rain.")
    deltas = [
        c.choices[0].delta for c in chat(client, stream=True, extra_body={"chat_template_kwargs": {"think": True}})
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "It rains."
    assert "".join(delta.content or "" for delta in deltas) == "Rain."


CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "now", "arguments": "{}"}}]}
# Chats with a tag of reasoning in messages or tools.
TAGGED = {
    "user": {"messages": [{"role": "user", "content": "What is <think>"}]},
    "system": {"messages": [{"role": "system", "content": "Write <think> first."}, *MESSAGES]},
    "tool": {"messages": [*MESSAGES, CALLED, {"role": "tool", "tool_call_id": "c", "content": "<think>"}]},
    "assistant": {"messages": [*MESSAGES, {"role": "assistant", "content": "<think>"}]},
    "function": {"tools": [{"type": "function", "function": CLOCK | {"description": "Not for <think>"}}]},
}


@pytest.mark.parametrize("name", TAGGED)
def test_tags_in_messages_and_tools_open_no_reasoning(client, says, name):
    says("Rain.")
    message = chat(client, **TAGGED[name]).choices[0].message
    assert message.content == "Rain." and not getattr(message, "reasoning_content", None)


@pytest.mark.parametrize("name", [name for name in TAGGED if name != "function"])
def test_tags_in_messages_do_not_lift_a_schema(chat_program, name):
    """The tags are tokens, so that a grammar waits for the end of reasoning. The model does not begin it by itself."""
    pytest.importorskip("xgrammar")
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    bias = {"500": -100}  # <think>
    fields = {"tool_choice": "none", "response_format": schema, "max_tokens": 20, "logit_bias": bias} | TAGGED[name]
    with scripted(chat_program, TEMPLATE, ("<think>", "</think>")) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            (choice,) = chat(client, **fields).choices
            assert choice.message.content in ("true", "false") and choice.finish_reason == "stop"
            # With a template that opens reasoning, the model of random weights thinks up to max_tokens.
            message = chat(client, **fields, extra_body={"chat_template_kwargs": {"think": True}}).choices[0].message
            assert message.reasoning_content and not message.content
            # An answer that ended within the reasoning would not follow the schema.
            bias |= {str(small_llm.EOS): 100}
            (choice,) = chat(client, **fields, extra_body={"chat_template_kwargs": {"think": True}}).choices
            assert choice.finish_reason == "length" and choice.message.reasoning_content


def test_answer_may_continue_the_reasoning_of_the_last_message(chat_program):
    with scripted(chat_program, small_llm.TEMPLATE + "{# </think> #}") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            server.text = "It rains.</think>Rain."
            for content in ("<think>Hm. ", "<think>Hm."):
                begun = {"role": "assistant", "content": content}
                message = chat(client, messages=[*MESSAGES, begun]).choices[0].message
                assert (message.reasoning_content, message.content) == ("It rains.", "Rain.")


def test_answer_continues_the_final_message(client, server, says):
    import httpx

    begun = [*MESSAGES, {"role": "assistant", "content": "It will."}]
    says(" Rain.")
    fields = {"messages": begun, "tools": [], "extra_body": {"continue_final_message": True}}
    for prompt in (None, False):  # vLLM's clients send false
        fields["extra_body"] |= {"add_generation_prompt": prompt}
        assert chat(client, **fields).choices[0].message.content == " Rain."
    assert [prompt.partition("[assistant]")[2] for prompt in server.prompts[-2:]] == ["It will."] * 2
    begun[-1]["content"] = "<think>Perhaps"
    says(" not.</think>Rain.")
    message = chat(client, **fields).choices[0].message
    assert (message.reasoning_content, message.content) == (" not.", "Rain.")
    body = {"model": NAME, "messages": begun, **fields["extra_body"]}
    ids = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    assert server.llm.tokenizer.decode(ids) == server.prompts[-1]


def test_chat_without_a_generation_prompt(client, server, says):
    says("Rain.")
    template = small_llm.TEMPLATE.replace("{{- hint -}}", "{% if add_generation_prompt %}:{% endif %}")
    server.llm.tokenizer.chat_template, before = template, server.llm.tokenizer.chat_template
    try:
        chat(client, tools=[])
        chat(client, tools=[], extra_body={"add_generation_prompt": False})
    finally:
        server.llm.tokenizer.chat_template = before
    assert [prompt[-1] for prompt in server.prompts[-2:]] == [":", "\n"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"add_generation_prompt": True}, "got true together with add_generation_prompt, expected one of them"),
        ({"messages": [*MESSAGES, CALLED]}, "only a last message with text and without tool_calls can be continued"),
    ],
)
def test_final_message_that_cannot_be_continued(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        chat(client, tools=[], extra_body={"continue_final_message": True, **fields})


def test_template_that_rejects_content_beside_calls(chat_program):
    rejecting = "{% if messages[-1].content and messages[-1].tool_calls %}{{ raise_exception('both') }}{% endif %}"
    with scripted(chat_program, rejecting + TEMPLATE) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            server.text = "It rains.</think>Rain."
            fields = {"messages": [*MESSAGES, CALLED], "extra_body": {"chat_template_kwargs": {"think": True}}}
            assert chat(client, **fields).choices[0].message.content == "Rain."


def test_special_tokens_are_tags_of_their_format(chat_program):
    """The tags of Mistral are special tokens, which have no text."""
    special = ("[TOOL_CALLS]", "[INST]")
    llm = LLM.load(chat_program)
    from executorch_mlx.serve.model import ServedModel

    llm.tokenizer = Tokenizer(
        with_tokens(llm, special), {"additional_special_tokens": list(special)}, "[TOOL_CALLS]"
    )
    model = ServedModel(llm, NAME)
    assert model.format.name == "mistral" and model.marker_tokens == {500: "[TOOL_CALLS]"}
    assert len(model.call_id()) == 9 and model.call_id().isalnum()


def test_template_without_tools_gets_instructions(chat_program):
    with scripted(chat_program, small_llm.TEMPLATE) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            server.text = CALL
            message = chat(client).choices[0].message
            assert message.tool_calls[0].function.name == "get_weather"
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
            chat(client, messages=[{"role": "developer", "content": "Hi"}, *MESSAGES, message.model_dump(), result])
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1"}}
            server.text = "Hi"
            # The client sends back a call whose arguments are no JSON object.
            broken = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
            assert chat(client, messages=broken).choices[0].message.content == "Hi"
    assert '<tools>\n{"type": "function"' in server.prompts[0]
    assert server.prompts[1].startswith("Hi\n\nYou can call functions.")
    assert "<tool_response>\nrain\n</tool_response>" in server.prompts[1] and CALL in server.prompts[1]


def test_template_without_system_messages_gets_instructions(chat_program):
    """As that of Gemma 2."""
    reject = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with scripted(chat_program, reject + small_llm.TEMPLATE) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            server.text = CALL
            assert chat(client).choices[0].message.tool_calls[0].function.name == "get_weather"
    assert server.prompts[0].startswith("You can call") and server.prompts[0].endswith(
        f"\n\n{MESSAGES[0]['content']}\n"
    )


def test_template_for_one_call_gets_one(chat_program):
    """As that of Llama 3.1, which rejects a message with several calls."""
    pytest.importorskip("xgrammar")
    reject = (
        "{% for message in messages if message.tool_calls and message.tool_calls | length > 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endfor %}"
    )
    with scripted(chat_program, reject + TEMPLATE) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            choices = [chat(client, tool_choice="required", seed=seed, max_tokens=300).choices[0] for seed in range(3)]
            server.text = f"{CALL}\n{CALL}"
            choices.append(chat(client).choices[0])
    assert [len(choice.message.tool_calls) for choice in choices] == [1] * 4


def test_choices_draw_with_different_seeds(client):
    answer = chat(client, tools=[], n=3, max_tokens=6, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in answer.choices]
    assert len({*texts}) == 3 and [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts[0] == chat(client, tools=[], max_tokens=6).choices[0].message.content
    assert answer.usage.completion_tokens <= 18
    chunks = [chunk.choices[0] for chunk in chat(client, tools=[], n=3, max_tokens=6, stream=True)]
    for index, text in enumerate(texts):
        assert "".join(chunk.delta.content or "" for chunk in chunks if chunk.index == index) == text


@pytest.mark.parametrize(
    "text, content",
    [
        ("<think>\nIt < rains.\n</think>\n\nRain < </b> it.", "Rain < </b> it."),
        ('I call:<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>', "I call:"),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call> x', None),
        ("<think>It rains.", ""),
    ],
    ids=["reasoning", "call", "malformed call", "only reasoning"],
)
def test_log_probabilities_are_those_of_the_content(client, says, text, content):
    """The tags are several tokens each. In a stream, a token comes with the beginning of its text."""
    says(text)
    choice = chat(client, logprobs=True).choices[0]
    content = text if content is None else content
    assert "".join(entry.token for entry in choice.logprobs.content) == (choice.message.content or "") == content
    tokens = text = ""
    for chunk in chat(client, logprobs=True, stream=True):
        entries = chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
        tokens += "".join(entry.token for entry in entries)
        text += chunk.choices[0].delta.content or ""
        assert tokens.startswith(text)  # the text after "<" may be held back
    assert tokens == text == content


def test_log_probabilities(client, server):
    choice = chat(client, tools=[], max_tokens=5, logprobs=True, top_logprobs=3, temperature=0).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    streamed = [
        entry
        for chunk in chat(client, tools=[], max_tokens=5, logprobs=True, temperature=0, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]
    answer = client.completions.create(model=NAME, prompt=["Return", "The"], n=2, max_tokens=3, logprobs=2, seed=1)
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [3] * 4
    assert answer.choices[0].logprobs.text_offset[0] == 0
    for token, top in zip(answer.choices[0].logprobs.tokens, answer.choices[0].logprobs.top_logprobs):
        assert token in top and len(top) in (2, 3)  # the two most likely tokens, and the drawn one


def test_names_and_places_of_tokens_that_are_parts_of_characters(client, server, says):
    text = "a é😀<s>b\n"
    says(text)
    fields = {"model": NAME, "prompt": "Return", "max_tokens": 40, "logprobs": 20}
    (choice,) = client.completions.create(**fields).choices
    given = choice.logprobs
    assert choice.text == "a é😀b\n"  # a special token has no text
    data, place = b"", {}  # the first byte of each character -> its place
    for index, character in enumerate(choice.text):
        place |= dict.fromkeys(range(len(data), len(data) + len(character.encode())), index)
        data += character.encode()
    position, pieces = 0, []
    for token, offset in zip(given.tokens, given.text_offset, strict=True):
        if token == "<s>":
            assert offset == place[position]
            continue
        is_part = token.startswith("bytes:")
        piece = bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if is_part else token.encode()
        assert offset == place[position] and (is_part or choice.text[offset:].startswith(token))
        position += len(piece)
        pieces.append(piece)
    assert b"".join(pieces) == data and any(token.startswith("bytes:\\x") for token in given.tokens)
    assert {len(top) for top in given.top_logprobs} <= {20, 21}
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**fields, stream=True)]
    assert [offset for chunk in chunks if chunk for offset in chunk.text_offset] == given.text_offset
    assert [token for chunk in chunks if chunk for token in chunk.tokens] == given.tokens


def test_places_of_tokens_with_invalid_bytes():
    random = numpy.random.default_rng(0)
    for _ in range(200):
        offsets, before = Offsets(), b""
        for _ in range(20):
            data = bytes(random.choice([0x41, 0xC3, 0xA9, 0xE0, 0x9F, 0xF0, 0x98, 0x80, 0xFF], random.integers(4)))
            whole = len((before + data[:1]).decode(errors="replace"))
            assert not data or offsets.take(data) == whole - 1
            before += data


def test_answer_that_begins_with_the_stop_id_has_empty_log_probabilities(client, server, says):
    says("")
    (choice,) = chat(client, tools=[], logprobs=True, top_logprobs=2).choices
    assert choice.message.content == "" and choice.logprobs.content == []
    (choice,) = client.completions.create(model=NAME, prompt="Return", logprobs=2).choices
    assert choice.text == "" and choice.logprobs.tokens == choice.logprobs.text_offset == []
    assert client.completions.create(model=NAME, prompt="Return").choices[0].logprobs is None


def test_more_log_probabilities_than_those_of_the_head_return_400(logprob_program):
    with served.serve(logprob_program) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        message = "logprobs: got 5, expected at most 4, the number that the program was exported with"
        for field, request in (
            ("top_logprobs", lambda k: chat(client, tools=[], max_tokens=1, logprobs=True, top_logprobs=k)),
            ("top_logprobs", lambda k: client.responses.create(model=NAME, input="x", top_logprobs=k)),
            ("logprobs", lambda k: client.completions.create(model=NAME, prompt="x", max_tokens=1, logprobs=k)),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                request(5)
            assert caught.value.param == field and caught.value.message.endswith(message)
            assert caught.value.body["message"].startswith(f"{field}: ")
            request(4)


def test_echo(client, server):
    (choice,) = client.completions.create(model=NAME, prompt="Return", max_tokens=2, echo=True, seed=1).choices
    assert choice.text.startswith("Return") and len(choice.text) > len("Return")
    ids = server.llm.encode("Return")
    (choice,) = client.completions.create(model=NAME, prompt=ids, max_tokens=2, echo=True, seed=1).choices
    assert choice.text.startswith("Return") and len(choice.text) > len("Return")


@pytest.mark.parametrize("program", ["logprob_program", "chat_program"])  # scores in one call; token by token
def test_echo_with_log_probabilities(program, request):
    settings = {"model": NAME, "echo": True, "logprobs": 2, "temperature": 0}
    text = "Return the value of\n"
    with served.serve(request.getfixturevalue(program)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            ids = server.llm.encode(text)
            (whole,) = client.completions.create(prompt=text, max_tokens=3, **settings).choices
            choices = client.completions.create(prompt=[ids, [5]], n=2, max_tokens=0, **settings)
            stream = [*client.completions.create(prompt=ids, max_tokens=3, stream=True, **settings)]
        (score,) = server.llm.score(ids[:1], [ids[1:]], logprobs=2)
        names = [server.llm.text([id]) for id in ids[1:]]
    given = whole.logprobs
    assert given.tokens[1 : len(ids)] == names and whole.text.startswith(text) and given.top_logprobs[0] is None
    assert given.token_logprobs[: len(ids)] == pytest.approx([None, *score.logprobs], abs=1e-4)
    for top, pairs in zip(given.top_logprobs[1:], score.top_logprobs):
        assert [*top.values()][:2] == pytest.approx([value for _, value in pairs], abs=1e-4)
    # The draws are greedy: each token of the answer is the first of the most likely ones.
    answer = range(len(ids), len(ids) + 3)
    assert [max(given.top_logprobs[i], key=given.top_logprobs[i].get) for i in answer] == given.tokens[len(ids) :]
    for token, offset in zip(given.tokens[1:], given.text_offset[1:]):
        assert token.startswith("bytes:") or whole.text.startswith(token, offset)
    assert [choice.text for choice in choices.choices] == [text, text] + [server.llm.text([5])] * 2
    assert [len(choice.logprobs.tokens) for choice in choices.choices] == [len(ids), len(ids), 1, 1]
    assert (choices.usage.prompt_tokens, choices.usage.completion_tokens) == (len(ids) + 1, 0)
    assert choices.choices[0].finish_reason == "length"
    pieces = [chunk.choices[0] for chunk in stream]
    assert "".join(piece.text for piece in pieces) == whole.text
    joined = [value for piece in pieces if piece.logprobs for value in piece.logprobs.token_logprobs]
    assert joined == pytest.approx(given.token_logprobs, abs=1e-4)


def test_deadline_ends_the_computation_of_an_echo(chat_program):
    """Here, each token of the prompts takes a call."""
    import httpx

    body = {"model": NAME, "prompt": [[5] * 900] * 16, "echo": True, "logprobs": 1, "max_tokens": 0}
    with served.serve(chat_program, request_seconds=0.5) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 504
        server.app.state.service.models.loaded[NAME].scoring_threads.shutdown()  # waits for it
        assert 0 < server.llm.stats.requests < 16 * 900


def test_echo_of_a_model_that_cannot_score_returns_400(mask_program):
    with served.serve(mask_program) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError, match="export it with --logprobs") as caught:
            client.completions.create(model=NAME, prompt="Return", max_tokens=0, echo=True, logprobs=1)
        assert caught.value.param == "echo"


def test_text_of_tokens_without_bytes_returns_400(logits_program):
    with served.serve(logits_program) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for field, value in (("echo", True), ("logprobs", 0)):
            with pytest.raises(openai.BadRequestError, match=f"{field}: .* has neither token bytes nor a") as caught:
                client.completions.create(model=NAME, prompt=[5], max_tokens=1, **{field: value})
            assert caught.value.param == field
        assert client.completions.create(model=NAME, prompt=[5], max_tokens=1).usage.completion_tokens == 1


def test_tokens_of_texts_and_chats(server):
    import httpx

    text = "Return the value"
    given = httpx.post(f"{server.url}/tokenize", json={"model": NAME, "prompt": text, "return_token_strs": True}).json()
    ids = given["tokens"]
    assert ids == server.llm.encode(text) and given["count"] == len(ids) and given["max_model_len"] == small_llm.CONTEXT
    assert "".join(given["token_strs"][1:]) == text
    back = httpx.post(f"{server.url}/detokenize", json={"model": NAME, "tokens": ids[1:]}).json()
    assert back == {"prompt": text}
    chat = httpx.post(f"{server.url}/tokenize", json={"model": NAME, "messages": MESSAGES}).json()
    assert server.llm.text(chat["tokens"]).startswith("[user]What is")
    for path, body, param in (
        ("tokenize", {}, None),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, None),
        ("detokenize", {"tokens": [99999]}, "tokens"),
    ):
        response = httpx.post(f"{server.url}/{path}", json={"model": NAME} | body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_metrics(server, client):
    import httpx

    chat(client, tools=[], max_tokens=3)
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values[f'executorch_mlx_time_to_first_token_seconds_count{{model="{NAME}"}}']) >= 1
    assert float(values[f'executorch_mlx_engine_generated_tokens_total{{model="{NAME}"}}']) >= 3
    assert float(values[f'executorch_mlx_engine_rows{{model="{NAME}"}}']) == 1
