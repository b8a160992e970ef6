"""The API of the server, called with the `openai` package."""

import gzip
import json
import logging
import socket

import httpx
import jsonschema
import numpy as np
import openai
import pytest
import served
import small_llm
from executorch_mlx.llm import PromptLengthError
from executorch_mlx.llm.tokenizer import Tokenizer
from served import NAME

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Return"}]


def chat(client, **fields):
    return client.chat.completions.create(
        **{"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 12} | fields
    )


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    model = client.models.retrieve(NAME)
    assert model.object == "model" and model.has_chat_template is True
    able = {name for name, value in model.capabilities.items() if value}
    assert able >= {"chat", "tools", "response_format", "logprobs", "frequency_penalty", "logit_bias"}
    assert model.default_sampling == {}
    assert model.context_length == model.max_input_tokens == small_llm.CONTEXT
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_description_of_the_api_has_the_errors(server):
    description = httpx.get(f"{server.url}/openapi.json").json()
    schemas = description["components"]["schemas"]
    assert "HTTPValidationError" not in schemas  # FastAPI's
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
            answer = httpx.request(method, f"{server.url}{path}", content="{", timeout=60)
            if answer.status_code != 200:
                jsonschema.validate(answer.json(), schemas[error] | {"components": description["components"]})
    content = {path: description["paths"][path] for path in ("/v1/chat/completions", "/v1/messages", "/metrics")}
    assert all("text/event-stream" in content[path]["post"]["responses"]["200"]["content"] for path in [*content][:2])
    assert [*content["/metrics"]["get"]["responses"]["200"]["content"]] == ["text/plain"]


def test_chat(client, llm):
    expected = llm.chat(MESSAGES, max_new_tokens=12).result()
    answer = chat(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == NAME
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.metrics.prompt_tokens, 12)
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_chat_stream(client, llm):
    expected = llm.chat(MESSAGES, max_new_tokens=12).result()
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    *texts, last, usage = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in texts) == expected.text
    assert len(texts) > 5
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert usage.choices == [] and usage.usage.completion_tokens == 12
    assert all(chunk.to_dict()["usage"] is None for chunk in [*texts, last])
    assert len({chunk.id for chunk in chunks}) == 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in chat(client, stream=True, stream_options=options)]
    assert counts == sorted(counts) and counts[0] < 2 and counts[-1] == 12 and len({*counts}) > 5


# Name: (parameters of the OpenAI API, parameters that only this server takes).
SAMPLING = {
    "temperature": ({"temperature": 1.5}, {}),
    "top_p": ({"temperature": 1.5, "top_p": 0.7}, {}),
    "extra": ({"temperature": 1.5}, {"top_k": 9, "min_p": 0.02, "repetition_penalty": 0.2}),
    "penalties": ({"presence_penalty": -2.0, "frequency_penalty": -2.0}, {}),
    "bias": ({"temperature": 1.0, "logit_bias": {300: 9.0}}, {}),
}


@pytest.mark.parametrize("fields, extra", SAMPLING.values(), ids=SAMPLING)
def test_sampling_parameters_reach_the_model(client, llm, fields, extra):
    parameters = fields | extra
    expected = llm.chat(MESSAGES, max_new_tokens=12, seed=3, **parameters).result().text
    answer = chat(client, seed=3, extra_body=extra, **fields)
    assert answer.choices[0].message.content == expected
    # The parameters change the text. If there are several, the text differs from that of the temperature alone.
    temperature = parameters.get("temperature", 0) if len(parameters) > 1 else 0
    assert expected != llm.chat(MESSAGES, max_new_tokens=12, seed=3, temperature=temperature).result().text


def test_stop_strings(client, llm):
    text = llm.chat(MESSAGES, max_new_tokens=12).result().text
    stop = text[8:12]
    assert len(stop) == 4 and text.index(stop) > 0
    for given in (stop, ["absent", stop]):
        (choice,) = chat(client, stop=given).choices
        assert choice.message.content == text[: text.index(stop)]
        assert choice.finish_reason == "stop"


def test_message_may_have_several_text_parts(client):
    parts = [{"type": "text", "text": "Ret"}, {"type": "text", "text": "urn"}]
    expected, answer = chat(client), chat(client, messages=[MESSAGES[0], {"role": "user", "content": parts}])
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.choices[0].message.content == expected.choices[0].message.content != ""


def test_second_turn_reuses_the_cache(client):
    first = chat(client, seed=1)
    # The client sends the message back with all its empty fields.
    messages = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
    second = chat(client, messages=messages)
    # The last line feed may form a token with the text that follows it.
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_completions(client, llm):
    expected = llm.generate("Return the", max_new_tokens=16).result()  # 16 is OpenAI's default
    assert len(expected.tokens) == 16 and expected.text
    for prompt in ("Return the", llm.encode("Return the"), ["Return the"]):
        answer = client.completions.create(model=NAME, prompt=prompt, temperature=0)
        assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == "length"
    chunks = client.completions.create(model=NAME, prompt="Return the", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text


def test_stop_token_ids(client, llm):
    """vLLM's field: the answer ends before such a token."""
    tokens = llm.generate("Return the", max_new_tokens=16, temperature=1.0, seed=5).result().tokens
    count = next(n for n in range(3, 16) if tokens[n] not in tokens[:n])
    body = {"stop_token_ids": [99, tokens[count]]}
    (choice,) = client.completions.create(model=NAME, prompt="Return the", seed=5, extra_body=body).choices
    assert (choice.text, choice.finish_reason) == (llm.text(tokens[:count]), "stop")
    with pytest.raises(openai.BadRequestError, match="stop_token_ids: id 99999 is outside the vocabulary"):
        chat(client, extra_body={"stop_token_ids": [99999]})


def test_temperature_defaults_to_one(client, llm):
    expected = llm.generate("Return", max_new_tokens=16, temperature=1.0, seed=5).result().text
    assert expected != llm.generate("Return", max_new_tokens=16).result().text
    assert client.completions.create(model=NAME, prompt="Return", seed=5).choices[0].text == expected


def test_fields_may_have_values_without_effect(client, llm):
    fields = {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "user": "me", "store": False}
    fields |= {"top_logprobs": 0, "extra_body": {"ignore_eos": None, "priority": None, "other": None}}
    fields |= {"store": True, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "flex"}
    fields["extra_body"] |= {"prompt_cache_options": {"mode": "implicit"}, "add_generation_prompt": True}
    fields["extra_body"] |= {"length_penalty": 1, "min_tokens": 0, "skip_special_tokens": True, "stop_token_ids": []}
    fields["extra_body"] |= {"bad_words": [], "echo": False, "add_special_tokens": False, "request_id": "r"}
    fields["extra_body"] |= {"cache_prompt": True, "typical_p": 1, "separate_reasoning": True}
    fields["messages"] = [message | {"cache_control": None, "type": "text"} for message in MESSAGES]
    (choice,) = chat(client, metadata={"a": "b"}, parallel_tool_calls=True, **fields).choices
    expected = llm.chat(MESSAGES, max_new_tokens=12).result()
    assert (choice.message.content, choice.finish_reason) == (expected.text, "length") and expected.text


def test_load_generators_set_the_length_of_an_answer(client):
    """By both `min_tokens` and `max_tokens`, which `ignore_eos` makes exact."""
    body = {"min_tokens": 12, "ignore_eos": True}
    assert chat(client, extra_body=body).usage.completion_tokens == 12
    answer = client.completions.create(model=NAME, prompt="Return", max_tokens=12, extra_body=body)
    assert answer.usage.completion_tokens == 12


def test_minimum_length(client):
    """No stop id is drawn before, and the text before may contain stop strings."""
    bias = {small_llm.EOS: 1000}
    for minimum, count in ((0, 1), (5, 6)):  # the stop id counts
        answer = chat(client, logit_bias=bias, seed=3, extra_body={"min_tokens": minimum})
        assert answer.usage.completion_tokens == count and answer.choices[0].finish_reason == "stop"
    text = chat(client).choices[0].message.content
    assert chat(client, stop=[text[:3]]).choices[0].message.content == ""
    assert chat(client, stop=[text[:3]], extra_body={"min_tokens": 12}).choices[0].message.content == text


def test_allowed_token_ids(client, llm):
    bits = np.zeros(small_llm.VOCABULARY, dtype=np.uint8)
    bits[[5, 300, 301]] = 1
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    settings = {"temperature": 5, "seed": 3, "max_tokens": 20}
    answer = chat(client, **settings, extra_body={"allowed_token_ids": [301, 5, 300]}).choices[0].message.content
    expected = llm.chat(MESSAGES, temperature=5, seed=3, max_new_tokens=20, allowed_tokens=lambda _: mask).result()
    assert answer == expected.text and {*expected.tokens} == {5, 300, 301}


def test_bad_words(client, llm):
    """The last token of a bad word does not follow the others, also not after a space."""
    word = "zzq"
    first, second, *others = llm.encode(word, special=False)
    body = {"prompt": [5], "max_tokens": 40, "logprobs": 0, "seed": 1, "temperature": 5}
    ids = {"allowed_token_ids": [first, second, *others, 300]}

    def words(**fields):
        text = client.completions.create(model=NAME, **body, extra_body=ids | fields).choices[0].text
        return text.count(word)

    assert words() > 0 and words(bad_words=[word]) == words(bad_words=["a", f" {word}"]) == 0


def test_rules_that_allow_no_token(client, llm):
    for field, fields in {
        "bad_words": {"allowed_token_ids": [5], "bad_words": [llm.text([5])]},
        "allowed_token_ids": {"allowed_token_ids": [small_llm.EOS], "min_tokens": 1},
    }.items():
        with pytest.raises(openai.BadRequestError, match=f"{field}: no token may follow after 0 tokens") as caught:
            client.completions.create(model=NAME, prompt="x", extra_body=fields)
        assert caught.value.param == field


def test_minus_one_is_no_limit(client):
    """LM Studio and llama.cpp know it so."""
    limits = [chat(client, max_tokens=tokens, seed=4, temperature=1, stop="a").usage for tokens in (None, -1)]
    assert limits[0].completion_tokens == limits[1].completion_tokens
    answer = client.completions.create(model=NAME, prompt="Return", max_tokens=-1, seed=5, stop=" ")
    assert answer.choices[0].finish_reason == "stop"


def test_prompts_without_special_tokens(client, llm):
    for special in (True, False):
        answer = client.completions.create(
            model=NAME, prompt="Return", max_tokens=1, extra_body={"add_special_tokens": special}
        )
        assert answer.usage.prompt_tokens == len(llm.encode("Return", special))
    assert len(llm.encode("Return", True)) > len(llm.encode("Return", False))


def test_whole_numbers_are_integers(client):
    """Google's ADK sends a `top_k` such as 5.0, which is an integer in JSON Schema."""
    answers = [
        chat(client, max_tokens=4 * one, seed=3 * one, temperature=2, extra_body={"top_k": 20 * one}).choices[0]
        for one in (1, 1.0)
    ]
    assert answers[0] == answers[1]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def allowed_tools(*names: str, mode: str = "auto") -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOO_LONG = {"role": "user", "content": "x " * small_llm.CONTEXT}
HELLO = {"role": "user", "content": "x"}
INVALID = [
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"logprobs": "yes"}, "logprobs", "valid boolean"),
    ({"top_logprobs": 3}, "top_logprobs", "got a number without logprobs"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "has no use for it, expected null"),
    ({"verbosity": "low"}, "verbosity", 'got a value that this server does not support, expected "medium" or null'),
    (
        {"extra_body": {"min_tokens": 13, "ignore_eos": True}},
        "min_tokens",
        "got 13, expected at most the maximum length",
    ),
    ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs", "got -1, expected greater than or equal to 0"),
    ({"extra_body": {"bad_words": [""]}}, "bad_words.0", "got 0 characters, expected at least 1"),
    ({"extra_body": {"bad_words": [" "]}}, "bad_words", "bad_words: ' ' has no tokens"),
    ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids", "got 0 items, expected at least 1"),
    (
        {"extra_body": {"allowed_token_ids": [5, small_llm.VOCABULARY]}},
        "allowed_token_ids",
        "is outside the vocabulary [0, ",
    ),
    ({"extra_body": {"allowed_token_ids": [-1]}}, "allowed_token_ids", "id -1 is outside the vocabulary [0, "),
    ({"extra_body": {"logit_bias": [1]}}, "logit_bias", "logit_bias: got a list, expected an object"),
    ({"extra_body": {"user": 4}}, "user", "user: got int, expected a string"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature", 'temperature: got "hot", expected a valid number'),
    ({"messages": "hello"}, "messages", 'messages: got "hello", expected a valid list'),
    ({"extra_body": {"stream": []}}, "stream", "stream: got a list, expected a valid boolean"),
    ({"extra_body": {"temperature": True}}, "temperature", "valid number"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: got 0, expected an integer of at least 1"),
    ({"max_tokens": 2**40}, "max_tokens", "less than 2147483648"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "got -1, expected an integer of at least 1"),
    ({"seed": 2**70}, "seed", "expected an integer of 64 bits"),
    ({"seed": 2.5}, "seed", "got 2.5, expected a valid integer"),
    ({"max_tokens": 1e300}, "max_tokens", "less than 2147483648"),
    ({"stop": ""}, "stop", "got 0 characters, expected at least 1"),
    ({"stop": ["a"] * 65}, "stop", "got 65 items, expected at most 64"),
    ({"stop": ["a", ""]}, "stop.1", "got 0 characters, expected at least 1"),
    ({"stop": ["a\0"]}, "stop", "expected non-empty strings"),
    ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias", "id 1536 is outside the vocabulary"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias", "got the key 'x', expected token ids"),
    ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ({"messages": []}, "messages", "got 0 items, expected at least 1"),
    ({"messages": [HELLO, {"role": "robot"}]}, "messages.1.role", "got \"robot\", expected 'system', "),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "Field required"),
    ({"messages": ["hi"]}, "messages.0", 'got "hi", expected an object'),
    ({"extra_body": {"response_format": {"type": "regex"}}}, "response_format.type", "'json_object' or 'json_schema'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0", "image_url: got 'x', expected a data URL"),
    ({"messages": [{"role": "assistant"}]}, "messages.0", "without content and tool_calls"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "Field required"),
    ({"messages": [TOO_LONG]}, "messages", f"tokens, expected 1 to {small_llm.CONTEXT}"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"tools": [TOOL, TOOL]}, "tools", "got 'f' twice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "not in tools"),
    ({"tools": [TOOL], "tool_choice": allowed_tools("f", "g")}, "tool_choice", "not in tools"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs", "messages is reserved"),
]


@pytest.mark.parametrize("fields, param, message", INVALID, ids=range(len(INVALID)))
def test_invalid_request_returns_400(client, fields, param, message):
    for stream in {fields.get("stream", False), True}:
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, **fields | {"stream": stream})
        error = caught.value
        assert message in error.message and error.type == "invalid_request_error"
        assert error.param == param


UNKNOWN = {
    "beam": {"beam": 4},
    "stream_options.include": {"stream": True, "stream_options": {"include": 1}},
    "messages.0.mood": {"messages": [HELLO | {"mood": "good"}]},
    "tools.0.function.icon": {"tools": [{"type": "function", "function": {"name": "f", "icon": "x"}}]},
    "response_format.extra": {"response_format": {"type": "text", "extra": [1]}},
}


@pytest.mark.parametrize("path, fields", UNKNOWN.items(), ids=[*UNKNOWN])
def test_unknown_fields_are_ignored_and_logged(server, caplog, path, fields):
    body = {"model": NAME, "messages": [HELLO], "max_tokens": 2, "null": None} | fields
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "executorch_mlx.serve"]
    assert line == f'/v1/chat/completions: ignored unknown fields: "{path}"'


def test_a_strict_server_refuses_unknown_fields(chat_program):
    with served.serve(chat_program, strict=True) as server:
        for path, fields in UNKNOWN.items():
            body = {"model": NAME, "messages": [HELLO], "max_tokens": 2, "null": None} | fields
            error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
            assert error["message"] == f"{path}: unknown field" and error["param"] == path
            assert error["code"] == "unknown_parameter"
        for api, fields in (("responses", {"input": "x"}), ("messages", {"messages": [HELLO], "max_tokens": 2})):
            response = httpx.post(f"{server.url}/v1/{api}", json={"model": NAME, "beam": 1} | fields)
            assert response.status_code == 400 and "beam: unknown field" in response.text
        response = httpx.post(f"{server.url}/tokenize", json={"prompt": "x", "beam": 1})
        assert response.json()["error"]["param"] == "beam"


def test_fields_with_a_known_meaning_that_the_server_lacks_are_errors_in_all_apis(server):
    requests = {"chat/completions": {"messages": [HELLO]}, "responses": {"input": "x"}}
    requests["messages"] = {"messages": [HELLO], "max_tokens": 2}
    for api, fields in requests.items():
        for name, value in {"mirostat": 2, "typical_p": 0.5, "web_search_options": {}}.items():
            response = httpx.post(f"{server.url}/v1/{api}", json={"model": NAME, name: value} | fields)
            assert (
                response.status_code == 400
                and f"{name}: got a value that this server does not support" in response.text
            )
        off = {"mirostat": 0, "typical_p": 1.0, "keep_alive": "5m", "enable_thinking": False}
        assert httpx.post(f"{server.url}/v1/{api}", json={"model": NAME} | fields | off).status_code == 200


def test_names_of_other_servers(client):
    """llama.cpp's and Ollama's."""
    first = chat(client, max_tokens=5, extra_body={"repetition_penalty": 1.5})
    body = {"model": NAME, "messages": MESSAGES, "n_predict": 5, "temperature": 0, "repeat_penalty": 1.5}
    second = client.post("/chat/completions", body=body, cast_to=object)
    assert second["choices"][0]["message"]["content"] == first.choices[0].message.content
    pytest.importorskip("llguidance")
    for fields in (
        {"grammar": 'root ::= "yes" | "no"'},
        {"ebnf": 'root ::= "yes" | "no"'},
        {"regex": "yes|no"},
        {"json_schema": {"enum": ["yes", "no"]}},
    ):
        answer = chat(client, extra_body=fields).choices[0].message.content
        assert answer.strip('"') in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="got it together with regex") as caught:
        chat(client, extra_body={"regex": "a", "grammar": 'root ::= "a"'})
    assert caught.value.param == "grammar"


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"prompt": []}, "prompt", "prompt: got 0 tokens, expected 1 to"),
        ({"prompt": [5, -1]}, "prompt", "prompt: id -1 is outside the vocabulary"),
        ({"prompt": [10**6], "echo": True}, "prompt", "prompt: id 1000000 is outside the vocabulary"),
        ({"prompt": [[5], [-1]], "n": 2}, "prompt", "prompt: id -1 is outside the vocabulary"),
        ({"prompt": [5, "a"]}, "prompt.1", "valid integer"),
        ({"prompt": ["a", []]}, "prompt", ""),
        ({"prompt": {"a": 1}}, "prompt", "got an object, expected a valid string or a valid list"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix: got a value that this server does not support"),
        ({"prompt": "a", "best_of": 3}, "best_of", "best_of: got 3, expected n, which is 1"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "got 65 prompts with n = 2, expected at most 128 answers"),
        ({"prompt": "a", "logprobs": 50}, "logprobs", "less than or equal to 20"),
    ],
)
def test_invalid_completion_request_returns_400(client, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, **fields)
    assert message in caught.value.message and caught.value.param.split(".")[0] == param.split(".")[0]


def test_unknown_model_returns_404(client):
    with pytest.raises(
        openai.NotFoundError, match="model: got 'gpt', which does not exist; this server has 'small'"
    ) as caught:
        chat(client, model="gpt")
    assert caught.value.code == "model_not_found"


def test_tokenizer_endpoints_need_no_name_of_the_only_model(server):
    """lm-eval sends none."""
    with httpx.Client(base_url=server.url) as http:
        info = http.get("/tokenizer_info").json()
        assert info == http.get(f"/tokenizer_info?model={NAME}").json()
        assert (info["bos_token"], info["eos_token"], info["chat_template"]) == ("<s>", "</s>", small_llm.TEMPLATE)
        body = {"prompt": info["eos_token"], "add_special_tokens": False}
        assert http.post("/tokenize", json=body).json()["tokens"] == [small_llm.EOS]
        ids = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
        assert MESSAGES[0]["content"] in http.post("/detokenize", json={"tokens": ids}).json()["prompt"]


def test_errors_have_the_openai_format(server):
    with httpx.Client(base_url=server.url) as http:
        for response, status, message in (
            (http.post("/v1/completions", json={"prompt": "x"}), 400, "model: Field required"),
            (http.get("/v1/completions"), 405, "GET /v1/completions: Method Not Allowed, expected POST"),
            (http.post("/completions"), 404, "POST /completions: Not Found, expected /v1/completions"),
            (http.post("/v1/v1/messages"), 404, "POST /v1/v1/messages: Not Found, expected /v1/messages"),
        ):
            error = response.json()["error"]
            assert (response.status_code, error["message"], error["type"]) == (status, message, "invalid_request_error")
            assert set(error) == {"message", "type", "param", "code"}
        message = http.post("/v1/pictures/edits", json={}).json()["error"]["message"]
        assert message.startswith(
            "POST /v1/pictures/edits: Not Found, expected /v1/chat/completions, /v1/completions, "
        )


def test_invalid_json_returns_400(server):
    is_json = {"Content-Type": "application/json"}
    deep = "[" * 5000 + "]" * 5000
    for content, headers, message in (
        (b'{"model": "\xff"}', is_json, "is not valid JSON: byte 11 is not UTF-8"),
        (f'{{"model": "small", "prompt": {deep}}}', is_json, "nested too deeply"),
        ('{"model": "small", "seed": 1' + "0" * 5000 + "}", is_json, "is not valid JSON"),
        ('{"model": "small", ', is_json, "the request body is not valid JSON: "),
        ("[]", is_json, "the request body is not a JSON object"),
        ("{}", {"Content-Type": "text/plain"}, "its Content-Type is not application/json"),
    ):
        response = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
        error = response.json()["error"]
        assert response.status_code == 400 and message in error["message"] and error["param"] in (None, "prompt")


def test_prompt_that_is_too_long_has_the_openai_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[TOO_LONG])
    assert caught.value.code == "context_length_exceeded"
    assert f"This model's maximum context length is {small_llm.CONTEXT} tokens" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt=[])
    assert caught.value.code is None  # a shorter prompt would not help


def test_prompt_that_is_much_too_long_is_refused_without_counting_its_tokens(client, llm, monkeypatch):
    """Counting the tokens of 16 MiB, the largest request, takes half a minute."""
    message = f"got more than {small_llm.CONTEXT} tokens, expected 1 to {small_llm.CONTEXT}"
    encode, sizes = Tokenizer.encode, []

    def encode_and_count(tokenizer, text, special=True):
        sizes.append(len(text))
        return encode(tokenizer, text, special)

    monkeypatch.setattr(Tokenizer, "encode", encode_and_count)
    text = "the word " * 2**18
    for request in (
        lambda: client.completions.create(model=NAME, prompt=text),
        lambda: chat(client, messages=[{"role": "user", "content": text}]),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            request()
        assert caught.value.code == "context_length_exceeded"
    for start in (lambda: llm.generate(text), lambda: llm.chat([{"role": "user", "content": text}])):
        with pytest.raises(PromptLengthError, match=message) as caught:
            start()
        assert caught.value.count is None
    assert len(sizes) == 4 and max(sizes) < len(text) / 8


def test_host_header_must_be_local(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    for host, status in (("elsewhere.example", 400), ("LocalHost:8000", 200), ("localhost.", 200)):
        assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == status


def test_allowed_hosts(chat_program):
    """Behind a reverse proxy, which passes the name on by which clients know it."""
    with served.serve(chat_program, allowed_hosts=("Chat.example",)) as server:
        for host, status in (("chat.example:443", 200), ("other.example", 400), ("localhost", 200)):
            assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == status
    with served.serve(chat_program, allowed_hosts=("*",)) as server:
        assert httpx.get(f"{server.url}/health", headers={"Host": "other.example"}).status_code == 200


def test_http_1_0_needs_no_host_header(server):
    """As in the health checks of HAProxy."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_path_may_have_extra_slashes(server):
    body = {"model": NAME, "prompt": [5], "max_tokens": 1}
    for path in ("/v1/completions/", "//v1/completions", "/v1//completions"):
        response = httpx.post(server.url + path, json=body)
        assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 1
    assert httpx.get(f"{server.url}/v1/models/").json()["data"][0]["id"] == NAME
    assert httpx.get(f"{server.url}/page/").status_code == 404


def test_body_may_begin_with_a_byte_order_mark(server):
    body = "\ufeff" + json.dumps({"model": NAME, "prompt": [5], "max_tokens": 1})
    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{server.url}/v1/completions", content=body.encode(), headers=headers).status_code == 200


def test_pages_of_allowed_origins(server, chat_program):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with served.serve(chat_program, allowed_origins=("https://a.example",), api_key="k") as other:
        for url, origin, allowed in (
            (other.url, "https://a.example", "https://a.example"),
            (other.url, "https://b.example", None),
            (server.url, "https://a.example", None),
        ):
            before = httpx.options(f"{url}/v1/completions", headers={"Origin": origin} | asked)
            assert before.is_success == (allowed is not None)
            assert before.headers.get("access-control-allow-origin") == allowed
            # Chrome asks so when a page of a public address uses a local server.
            local = {"Access-Control-Request-Private-Network": "true"}
            before = httpx.options(f"{url}/v1/completions", headers={"Origin": origin} | asked | local)
            assert before.is_success == (allowed is not None)
            if allowed:
                assert before.headers["access-control-allow-private-network"] == "true"
        # An error has the header too; otherwise, the page could not read it.
        response = httpx.get(f"{other.url}/v1/models", headers={"Origin": "https://a.example"})
        assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "https://a.example"


def test_internal_error_has_the_headers_of_other_responses(chat_program, monkeypatch, caplog):
    """Without them, a page of another origin cannot read it."""
    # The entry is written after the response is sent, so that it is read after the server has ended.
    with (
        caplog.at_level(logging.INFO, "executorch_mlx.access"),
        served.serve(chat_program, allowed_origins=("https://a.example",)) as server,
    ):
        monkeypatch.setattr(server.app.state.service.models, "descriptions", lambda: 1 // 0)
        response = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://a.example"})
    assert response.status_code == 500 and response.json()["error"]["message"] == "internal error: ZeroDivisionError"
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    (entry,) = (json.loads(record.message) for record in caplog.records if record.name == "executorch_mlx.access")
    assert (entry["status"], entry["request_id"]) == (500, response.headers["x-request-id"])


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", f"/v1/models/{NAME}"])
def test_head(server, path):
    response = httpx.head(server.url + path)
    assert response.status_code == 200 and response.content == b"" and int(response.headers["content-length"]) > 0


def test_compressed_request_returns_415(server):
    body = gzip.compress(b'{"model": "small", "prompt": "x"}')
    for encoding, status, message in (
        ("gzip", 415, "Content-Encoding: got 'gzip', expected a body without compression"),
        ("identity", 400, "is not valid JSON"),
    ):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
        assert response.status_code == status and message in response.json()["error"]["message"]


def test_a_portable_program(portable_program):
    with served.serve(portable_program) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for fields in ({"temperature": 0}, {"temperature": 0.9, "seed": 3, "presence_penalty": 0.5, "logprobs": 2}):
            body = {"model": NAME, "prompt": [5, 17, 200], "max_tokens": 12, "ignore_eos": True} | fields
            (choice,) = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            alone = {name: value for name, value in fields.items() if name != "logprobs"}
            answer = server.llm.generate([5, 17, 200], max_new_tokens=12, ignore_eos=True, **alone).result()
            assert choice["text"] == answer.text and len(choice["text"]) > 12
