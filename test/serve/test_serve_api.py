"""The API of the server, called with the `openai` package."""

import httpx
import openai
import pytest
import small_llm
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
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


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
    assert len({chunk.id for chunk in chunks}) == 1


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


def test_temperature_defaults_to_one(client, llm):
    expected = llm.generate("Return", max_new_tokens=16, temperature=1.0, seed=5).result().text
    assert expected != llm.generate("Return", max_new_tokens=16).result().text
    assert client.completions.create(model=NAME, prompt="Return", seed=5).choices[0].text == expected


def test_unsupported_fields_may_have_values_without_effect(client, llm):
    fields = {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "user": "me", "store": False}
    (choice,) = chat(client, **fields).choices
    expected = llm.chat(MESSAGES, max_new_tokens=12).result()
    assert (choice.message.content, choice.finish_reason) == (expected.text, "length") and expected.text


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
LONG = {"role": "user", "content": "x " * small_llm.CONTEXT}
INVALID = [
    ({"n": 2}, "n", "n is not supported by this server: expected 1 or null"),
    ({"logprobs": True}, "logprobs", "logprobs is not supported by this server: expected false or null"),
    ({"logprobs": True, "top_logprobs": 3}, None, "is not supported by this server"),
    ({"tools": [TOOL]}, "tools", "tools is not supported by this server: expected [] or null"),
    ({"response_format": {"type": "json_object"}}, "response_format", 'expected {"type": "text"} or null'),
    ({"reasoning_effort": "low"}, "reasoning_effort", "is not supported by this server: expected null"),
    ({"extra_body": {"beam": 4}}, "beam", "beam: unknown field"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: got 0, expected an integer of at least 1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "got -1, expected an integer of at least 1"),
    ({"stop": ""}, "stop", "stop: got [''], expected non-empty strings"),
    ({"logit_bias": {n: 1.0 for n in range(2000)}}, "logit_bias", "id 1536 is outside the vocabulary"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "no role robot"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, None, "got a part of type 'image_url', expected 'text'"),
    ({"messages": [LONG]}, "messages", f"tokens, expected 1 to {small_llm.CONTEXT}"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [TOOL]}]}, None, "tool_calls is not supported"),
]


@pytest.mark.parametrize("fields, param, message", INVALID, ids=range(len(INVALID)))
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_request_returns_400(client, fields, param, message, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, stream=stream, **fields)
    error = caught.value
    assert message in error.message and error.type == "invalid_request_error"
    assert param is None or error.param == param


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"prompt": ["a", "b"]}, "prompt", "prompt: got 2 prompts, expected 1"),
        ({"prompt": []}, "prompt", "prompt: got 0 tokens, expected 1 to"),
        ({"prompt": [5, -1]}, "prompt", "prompt: id -1 is outside the vocabulary"),
        ({"prompt": "a", "echo": True}, "echo", "echo is not supported"),
        ({"prompt": "a", "logprobs": 0}, "logprobs", "logprobs is not supported"),
        ({"prompt": "a", "logprobs": 2}, "logprobs", "logprobs is not supported"),
    ],
)
def test_invalid_completion_request_returns_400(client, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, **fields)
    assert message in caught.value.message and caught.value.param == param


def test_unknown_model_returns_404(client):
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist; this server has 'small'") as caught:
        chat(client, model="gpt")
    assert caught.value.code == "model_not_found"


def test_errors_have_the_openai_format(server):
    with httpx.Client(base_url=server.url) as http:
        for response, status, message in (
            (http.post("/v1/completions", json={"prompt": "x"}), 400, "model: Field required"),
            (http.get("/v1/completions"), 405, "Method Not Allowed"),
            (http.get("/v1/nothing"), 404, "Not Found"),
        ):
            error = response.json()["error"]
            assert (response.status_code, error["message"], error["type"]) == (status, message, "invalid_request_error")
            assert set(error) == {"message", "type", "param", "code"}


def test_invalid_json_returns_400(server):
    json = {"Content-Type": "application/json"}
    for content, headers, message in (
        ('{"model": "small", ', json, "the request body is not valid JSON: "),
        ("[]", json, "the request body is not a JSON object"),
        ("{}", {"Content-Type": "text/plain"}, "its Content-Type is not application/json"),
    ):
        response = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
        error = response.json()["error"]
        assert response.status_code == 400 and message in error["message"] and error["param"] is None


def test_prompt_that_is_too_long_has_the_openai_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[LONG])
    assert caught.value.code == "context_length_exceeded"


def test_host_header_must_be_local(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    assert httpx.get(f"{server.url}/health", headers={"Host": "elsewhere.example"}).status_code == 400
