"""`/v1/responses`, called with the `openai` package."""

import json

import httpx
import openai
import pytest
from executorch_mlx.serve.errors import ApiError
from executorch_mlx.serve.stored import StoredResponses
from scripted import CALL, TEMPLATE, WEATHER, scripted, scripted_server, unscripted  # noqa: F401 (fixtures)
from served import NAME

TOOL = {"type": "function", **WEATHER, "strict": False}
HELLO = {"role": "user", "content": "Hi"}
BAD_TOOL = {"name": "bad", "parameters": {"type": "object", "properties": {"function": {"not": {}}}}}


def create(client, **fields):
    return client.responses.create(**{"model": NAME, "input": "Hi", "max_output_tokens": 60} | fields)


def test_text(client, server):
    server.text = "<think>hm</think>Hello."
    answer = create(client, instructions="Be brief.", metadata={"a": "b"})
    assert answer.output_text == "Hello." and answer.status == "completed" and answer.metadata == {"a": "b"}
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "hm" and answer.usage.output_tokens_details.reasoning_tokens > 1
    assert "[system]Be brief." in server.prompts[-1]
    # The client sends the output back.
    server.text = "Again."
    messages = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in answer.output)]
    again = create(client, input=[*messages, {"role": "user", "content": [{"type": "input_text", "text": "More"}]}])
    assert (
        again.output_text == "Again."
        and "[assistant]Hello." in server.prompts[-1]
        and "[user]More" in server.prompts[-1]
    )


def test_input_tokens_are_counted(client):
    for fields in ({"input": "Hi"}, {"input": [HELLO], "instructions": "Be brief.", "tools": [TOOL]}):
        count = client.responses.input_tokens.count(model=NAME, **fields)
        assert count.object == "response.input_tokens"
        assert count.input_tokens == create(client, **fields, max_output_tokens=1).usage.input_tokens
    assert client.responses.input_tokens.count(model=NAME, input="Hi " * 5000).input_tokens > 5000  # no limit
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(model=NAME, input="Hi", reasoning={"effort": "low"}, tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_stream_events(client, server):
    server.text = f"<think>hm</think>Hello.{CALL}"
    with client.responses.stream(model=NAME, input="Hi", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    for kind in ("reasoning_text.delta", "output_text.delta", "output_text.done", "function_call_arguments.done"):
        assert f"response.{kind}" in kinds
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


def test_calls_of_a_stream_come_in_pieces(client, server):
    server.text = f"{CALL}\n{CALL.replace('Oslo', 'Bergen')}"
    events = list(create(client, tools=[TOOL], max_output_tokens=None, stream=True))
    whole = create(client, tools=[TOOL], max_output_tokens=None)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for index, call in enumerate(whole.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        added, *deltas, done, item_done = own
        assert (added.type, added.item.status) == ("response.output_item.added", "in_progress")
        assert (added.item.name, added.item.arguments) == ("get_weather", "")
        assert {event.type for event in deltas} == {"response.function_call_arguments.delta"} and len(deltas) > 3
        assert "".join(event.delta for event in deltas) == call.arguments == done.arguments == item_done.item.arguments
        assert (done.type, done.name) == ("response.function_call_arguments.done", "get_weather")
        assert (item_done.type, item_done.item.status) == ("response.output_item.done", "completed")
        assert {event.item_id for event in [*deltas, done]} == {added.item.id} == {item_done.item.id}
    assert len(whole.output) == 2 and events[-1].type == "response.completed"


def test_call_that_is_malformed_is_an_incomplete_item(client, server):
    server.text = '<tool_call>{"name": "get_weather", "arguments": {"city": Oslo}}</tool_call>'
    call, message = create(client, tools=[TOOL]).output
    assert (call.status, call.arguments, message.content[0].text) == ("incomplete", '{"city": Oslo', "}}</tool_call>")
    events = list(create(client, tools=[TOOL], stream=True))
    assert [item.status for item in events[-1].response.output] == ["incomplete", "completed"]


def test_calls_and_their_results(client, server):
    server.text = CALL
    answer = create(client, tools=[TOOL])
    (call,) = answer.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Oslo", "days": 2},
    )
    server.text = "Rain."
    result = {"type": "function_call_output", "call_id": call.call_id, "name": call.name, "output": "rain"}
    sent = call.model_dump() | {"parsed_arguments": {"city": "Oslo"}}  # as after parse() of the openai package
    answer = create(client, tools=[TOOL], input=[{"role": "user", "content": "Hi"}, sent, result])
    assert answer.output_text == "Rain." and "[tool]rain" in server.prompts[-1]


def test_reasoning_effort_and_allowed_tools(client, server):
    server.text = "Rain."
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    answer = create(
        client,
        tools=[TOOL, TOOL | {"name": "now"}],
        tool_choice=choice,
        reasoning={"effort": "low", "summary": "auto"},
        extra_body={"prompt": None, "conversation": None},  # unsupported fields are accepted if they are null
    )
    assert answer.output_text == "Rain." and answer.reasoning.effort == "low" and answer.tool_choice.mode == "auto"
    assert server.prompts[-1].endswith("[effort low][assistant]") and '"name": "now"' not in server.prompts[-1]


def test_functions_of_a_namespace(client, server):
    """As Codex groups those of an MCP server. The model sees the name of the namespace in front of theirs."""
    own = [TOOL | {"description": "Its weather"}, {"type": "function", "name": "now"}]
    tools = [TOOL, {"type": "namespace", "name": "moon", "description": "The moon.", "tools": own}]
    server.text = CALL.replace("get_weather", "moon.get_weather") + CALL
    fields = {"tools": tools, "max_output_tokens": None, "extra_body": {"client_metadata": {"turn": "1"}}}
    answer = create(client, **fields)
    assert [(call.name, call.namespace) for call in answer.output] == [("get_weather", "moon"), ("get_weather", None)]
    assert [tool.type for tool in answer.tools] == ["function", "namespace"]
    assert '"name": "moon.get_weather", "description": "The moon.\\n\\nIts weather"' in server.prompts[-1]
    assert '"name": "moon.now"' in server.prompts[-1]
    events = list(create(client, stream=True, **fields))
    ends = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.name for event in ends] == ["get_weather"] * 2
    begins = [event for event in events if event.type == "response.output_item.added"]
    assert [event.item.namespace for event in begins] == ["moon", None]
    # The client sends the call back.
    server.text = "Dust."
    result = {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "dust"}
    sent = [HELLO, answer.output[0].model_dump(), result]
    assert create(client, input=sent, tools=tools).output_text == "Dust."
    pytest.importorskip("llguidance")
    for place, other in enumerate((TOOL | BAD_TOOL, TOOL)):
        namespace = {"type": "namespace", "name": "moon", "tools": [other] * (place + 1)}
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, tools=[TOOL, namespace], tool_choice="required")
        assert caught.value.param == ("tools.1.tools.0.parameters", "tools")[place]


def test_length_schema_and_log_probabilities(client):
    answer = create(
        client, max_output_tokens=4, include=["message.output_text.logprobs"], top_logprobs=2, temperature=0
    )
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert len(answer.output[0].content[0].logprobs) == answer.usage.output_tokens == 4
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    answer = create(client, text=text, extra_body={"seed": 1})
    assert isinstance(json.loads(answer.output_text)["ok"], bool)


def test_log_probabilities_of_a_stop_string(client, server):
    """Its tokens have no text, and come at the end of a stream."""
    server.text = "Hello there."
    fields = {"stop": ["there."]}
    options = {"include": ["message.output_text.logprobs"], "extra_body": fields}
    (whole,) = create(client, **options).output[0].content
    *_, last = create(client, stream=True, **options)
    assert last.response.output[0].content == [whole] and whole.text == "Hello "
    assert "".join(entry.token for entry in whole.logprobs).startswith("Hello there.")


def test_sampling_parameters_reach_the_model(client, server):
    """Those of the other endpoints, also where OpenAI's API has none here."""
    fields = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_p": 0.01, "seed": 3, "ignore_eos": True}
    answer = create(client, max_output_tokens=12, extra_body=fields | {"logit_bias": {"300": 2.0}, "priority": 1})
    ids = server.llm.encode(server.prompts[-1], special=False)
    expected = server.llm.generate(ids, max_new_tokens=12, temperature=1.0, logit_bias={300: 2.0}, **fields)
    assert answer.output_text == expected.result().text


def test_rules_for_tokens(client, server):
    """As in the other APIs. `text` and vLLM's field for the form of an answer exclude each other."""
    rules = {"allowed_token_ids": [300, 301], "min_tokens": 9, "bad_words": [server.llm.text([301])]}
    answer = create(client, extra_body=rules | {"seed": 3}, max_output_tokens=9)
    assert answer.output_text == server.llm.text([300] * 9) and answer.usage.output_tokens == 9
    pytest.importorskip("llguidance")
    assert create(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}).output_text in ("yes", "no")
    for name, value in (("min_tokens", 3), ("structured_outputs", {"json": {}})):
        with pytest.raises(openai.BadRequestError, match=f"text.format: got it together with {name}") as caught:
            create(client, text={"format": {"type": "json_object"}}, extra_body={name: value})
        assert caught.value.param == "text.format"


def test_fields_that_have_no_effect(client, server):
    server.text = "Hello."
    reasoning = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "abc", "other": None}
    fields = {"reasoning": {"effort": None, "summary": "detailed"}, "ignore_eos": None, "priority": None}
    fields |= {"include": ["file_search_call.results"], "prompt_cache_options": {"mode": "implicit"}}
    fields |= {"service_tier": "priority", "max_tool_calls": 3, "truncation": "auto"}  # the input is short enough
    answer = create(client, input=[HELLO, reasoning, HELLO], text={"verbosity": "medium"}, extra_body=fields)
    assert answer.output_text == "Hello." and (answer.truncation, answer.max_tool_calls) == ("auto", 3)
    assert answer.service_tier == "default"  # what the answer got
    assert (answer.text.format.type, answer.text.verbosity) == ("text", "medium")


def test_values_of_fields_of_other_tools_that_have_no_effect(client, server):
    """Those of tools that are searched, or called by programs of the model."""
    server.text = "Hello."
    tool = TOOL | {"defer_loading": False, "allowed_callers": ["direct"], "output_schema": {"type": "object"}}
    caller = {"caller": {"type": "direct"}}
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"} | caller
    result = {"type": "function_call_output", "call_id": "c", "output": "1"} | caller
    fields = {"tools": [tool], "reasoning": {"context": "auto", "mode": "standard"}}
    answer = create(client, input=[HELLO, call, result], extra_body=fields)
    assert answer.output_text == "Hello." and "output_schema" not in server.prompts[-1]
    assert answer.tools[0].model_dump(include=tool.keys()) == tool


def test_reasoning_that_comes_back_reaches_the_template(chat_program):
    """Between calls. gpt-oss's template calls it `thinking`."""
    template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.thinking }}{% endfor %}{% if tools %}{% endif %}"
    )
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}

    def thought(text):
        return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    items = [HELLO, thought("one"), call, result, thought("two"), {"role": "assistant", "content": "x"}, thought("3")]
    with scripted(chat_program, template) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            create(client, input=[*items, HELLO], max_output_tokens=1)
    assert server.prompts[-1] == "[user][assistant]one[tool][assistant]two[user]"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"input": []}, "input: got 0 items, expected at least 1"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]}, "input.0.call_id"),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        ({"input": [5]}, "input.0"),
        ({"input": "x " * 3000, "truncation": "auto"}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: the response 'resp_1' is not stored"),
        ({"input": [HELLO, {"type": "item_reference", "id": "a"}]}, "input.1: the item 'a' is not stored"),
        ({"input": [{"id": "a"}, HELLO]}, "input.0: the item 'a' is not stored"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"mirostat": 1}}, "mirostat"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOL | {"allowed_callers": ["programmatic"]}]}, "tools.0.allowed_callers.0"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.type"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [TOOL] * 128}, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"tools": [TOOL, TOOL | BAD_TOOL], "tool_choice": "required"}, "tools.1.parameters"),
        ({"extra_body": {"stop": ""}}, "stop"),
        ({"extra_body": {"stop": ["a"] * 65}}, "stop"),
    ],
)
def test_invalid_request_names_the_field(client, fields, message):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, stream=stream, **fields)
        assert caught.value.param == message.split()[0].rstrip(":") and "pydantic" not in caught.value.message
        assert caught.value.body["message"].startswith(message)


def test_stored_responses(client, server):
    server.text = "Hello."
    first = create(client, input="Hi", instructions="Be kind.")
    assert first.store and client.responses.retrieve(first.id) == first
    second = create(client, input=[HELLO], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert server.prompts[-1] == "[user]Hi[assistant]Hello.[user]" + HELLO["content"] + "[assistant]"
    stream = list(create(client, input="More", previous_response_id=second.id, stream=True))
    third = stream[-1].response
    assert client.responses.retrieve(third.id) == third
    assert (
        server.prompts[-1].startswith("[user]Hi[assistant]Hello.")
        and "[assistant]Hello.[user]More" in server.prompts[-1]
    )
    items = client.responses.input_items.list(third.id).data
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
    reference = {"type": "item_reference", "id": first.output[0].id}
    create(client, input=[HELLO, reference, HELLO])
    assert "[assistant]Hello." in server.prompts[-1]
    counted = {"model": NAME, "input": "More", "previous_response_id": second.id}
    count = httpx.post(f"{server.url}/v1/responses/input_tokens", json=counted).json()["input_tokens"]
    assert count == third.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        client.responses.retrieve(first.id)
    unstored = create(client, input="Hi", store=False)
    assert not unstored.store
    with pytest.raises(openai.BadRequestError, match="previous_response_id: the response") as caught:
        create(client, input="Hi", previous_response_id=unstored.id)
    assert caught.value.code == "previous_response_not_found"


def test_custom_tools(client, server):
    server.text = '<tool_call>{"name": "run", "arguments": {"input": "1 + 1"}}</tool_call>'
    tools = [TOOL, {"type": "custom", "name": "run", "format": {"type": "text"}}]
    first = create(client, tools=tools)
    (item,) = first.output
    assert (item.type, item.name, item.input, item.status) == ("custom_tool_call", "run", "1 + 1", "completed")
    events = list(create(client, tools=tools, stream=True))
    kinds = [event.type for event in events if "custom" in event.type]
    assert kinds == [f"response.custom_tool_call_input.{kind}" for kind in ("delta", "done")]
    assert events[-1].response.output[0].input == "1 + 1"
    server.text = "Two."
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "2"}
    assert create(client, input=[HELLO, item.model_dump(), result], tools=tools).output_text == "Two."
    assert create(client, input=[result], tools=tools, previous_response_id=first.id).output_text == "Two."
    assert '<tool_call>{"input": "1 + 1"}</tool_call>[tool]2' in server.prompts[-1]


def test_tools_of_a_stored_response(client, server):
    server.text = CALL
    first = create(client, tools=[TOOL])
    server.text = "Sunny."
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}
    create(client, input=[result], tools=[TOOL], previous_response_id=first.id)
    assert "</tool_call>[tool]sunny" in server.prompts[-1]


def test_the_oldest_stored_responses_go():
    stored = StoredResponses(300)
    for number in range(20):
        stored.add({"id": str(number), "output": []}, [])
    assert stored.get("19").body["id"] == "19" and stored._size <= 300
    with pytest.raises(ApiError, match="the response '0' is not stored"):
        stored.get("0")
    stored.add({"id": "large", "output": ["x" * 400]}, [])
    assert not stored._entries and stored._size == 0


def test_truncation_leaves_out_the_oldest_turns(client, server):
    server.text = "Hello."
    turns = [
        message
        for i in range(40)
        for message in (
            {"role": "user", "content": f"question {i} " + "word " * 20},
            {"role": "assistant", "content": f"answer {i}"},
        )
    ]
    items = [{"role": "system", "content": "Be kind."}, *turns, HELLO]
    with pytest.raises(openai.BadRequestError, match="input: got"):
        create(client, input=items)
    create(client, input=items, truncation="auto", max_output_tokens=100)
    prompt = server.prompts[-1]
    assert prompt.startswith("[system]Be kind.[user]question") and prompt.endswith(
        f"[user]{HELLO['content']}[assistant]"
    )
    begin = int(prompt.split("question ")[1].split()[0])
    assert (
        begin > 1 and all(f"answer {i}[" in prompt for i in range(begin, 40)) and f"answer {begin - 1}[" not in prompt
    )
    room = server.llm.program.max_context_len - 100
    longer = [*items[:1], *turns[2 * (begin - 1) :], HELLO]
    count = httpx.post(f"{server.url}/v1/responses/input_tokens", json={"model": NAME, "input": longer}).json()
    assert len(server.llm.encode(prompt, special=False)) <= room < count["input_tokens"]
