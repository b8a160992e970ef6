"""OpenAI's client package against a real server."""

import httpx
import openai
import pytest
import small_llm
from served import NAME

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Return"}]


def chat(client, **fields):
    asked = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 12} | fields
    return client.chat.completions.create(**asked)


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat(client, llm):
    expected = llm.chat(MESSAGES, max_new_tokens=12).result()
    answer = chat(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == NAME
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.metrics.prompt_tokens, 12)
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_a_stream(client, llm):
    expected = llm.chat(MESSAGES, max_new_tokens=12).result()
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    *parts, last, totals = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content for part in parts) == expected.text
    assert len(parts) > 5
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert totals.choices == [] and totals.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


SETTINGS = {
    "temperature": ({"temperature": 1.5}, {}),
    "top_p": ({"temperature": 1.5, "top_p": 0.7}, {}),
    "extra": ({"temperature": 1.5}, {"top_k": 9, "min_p": 0.02, "repetition_penalty": 0.2}),
    "penalties": ({"presence_penalty": -2.0, "frequency_penalty": -2.0}, {}),
    "bias": ({"temperature": 1.0, "logit_bias": {300: 9.0}}, {}),
}


@pytest.mark.parametrize("fields, extra", SETTINGS.values(), ids=SETTINGS)
def test_settings_are_those_of_the_model(client, llm, fields, extra):
    expected = llm.chat(MESSAGES, max_new_tokens=12, seed=3, **fields, **extra).result().text
    answer = chat(client, seed=3, extra_body=extra, **fields)
    assert answer.choices[0].message.content == expected


def test_stop_strings(client, llm):
    text = llm.chat(MESSAGES, max_new_tokens=12).result().text
    stop = text[8:12]
    for given in (stop, ["absent", stop]):
        (choice,) = chat(client, stop=given).choices
        assert choice.message.content == text[: text.index(stop)]
        assert choice.finish_reason == "stop"


def test_the_text_of_a_message_may_come_in_parts(client):
    parts = [{"type": "text", "text": "Ret"}, {"type": "text", "text": "urn"}]
    whole = chat(client).choices[0].message.content
    assert chat(client, messages=[MESSAGES[0], {"role": "user", "content": parts}]).choices[0].message.content == whole


def test_a_turn_goes_on_from_the_one_before(client):
    first = chat(client, seed=1)
    # What the client got is sent back as it came, with all its empty fields.
    messages = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
    second = chat(client, messages=messages)
    # But for the last line feed, which the tokenizer may join to what follows it.
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_completions(client, llm):
    expected = llm.generate("Return the", max_new_tokens=16).result()  # 16 is OpenAI's default
    for prompt in ("Return the", llm.encode("Return the"), ["Return the"]):
        answer = client.completions.create(model=NAME, prompt=prompt, temperature=0)
        assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == "length"
    chunks = client.completions.create(model=NAME, prompt="Return the", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text


def test_temperature_is_one_unless_it_is_given(client, llm):
    expected = llm.generate("Return", max_new_tokens=16, temperature=1.0, seed=5).result().text
    assert client.completions.create(model=NAME, prompt="Return", seed=5).choices[0].text == expected


def test_fields_that_ask_for_nothing_are_no_matter(client):
    neutral = {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "user": "me", "store": False}
    assert chat(client, **neutral).choices


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
REFUSED = [
    ({"n": 2}, "n", "n is not supported here, expected 1 or None"),
    ({"logprobs": True}, "logprobs", "logprobs is not supported here, expected False or None"),
    ({"logprobs": True, "top_logprobs": 3}, None, "not supported here"),
    ({"tools": [TOOL]}, "tools", "tools is not supported here"),
    ({"response_format": {"type": "json_object"}}, "response_format", "is not supported here"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "is not supported here"),
    ({"extra_body": {"beam": 4}}, "beam", "beam is not a parameter here"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, expected at least 1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1, expected at least 1"),
    ({"stop": ""}, "stop", "stop is [''], expected strings that are not empty"),
    ({"logit_bias": {n: 1.0 for n in range(2000)}}, "logit_bias", "id 1536 is outside the vocabulary"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "no role robot"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None, "a part is 'image_url', expected text"),
    ({"messages": [{"role": "user", "content": "x " * small_llm.CONTEXT}]}, "messages", f"expected 1 to {small_llm.CONTEXT}"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [TOOL]}]}, None, "tool_calls is not supported"),
]


@pytest.mark.parametrize("fields, param, told", REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_there_is_refused(client, fields, param, told, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, stream=stream, **fields)
    error = caught.value
    assert told in error.message and error.type == "invalid_request_error"
    assert param is None or error.param == param


def test_other_prompts_are_refused(client):
    for fields in ({"prompt": "a", "logprobs": 0}, {"prompt": ["a", "b"]}, {"prompt": []}, {"prompt": [5, -1]}, {"prompt": "a", "echo": True}, {"prompt": "a", "logprobs": 2}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=NAME, **fields)


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist here, only 'small'") as caught:
        chat(client, model="gpt")
    assert caught.value.code == "model_not_found"


def test_errors_have_openais_shape(server):
    with httpx.Client(base_url=server.url) as http:
        for response in (
            http.post("/v1/completions", content="{", headers={"Content-Type": "application/json"}),
            http.post("/v1/completions", json={"prompt": "x"}),
            http.get("/v1/completions"),
            http.get("/v1/nothing"),
        ):
            assert 400 <= response.status_code < 500
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_no_json_is_told_as_such(server):
    json = {"Content-Type": "application/json"}
    for content, headers, told in (
        ('{"model": "small", ', json, "the body is no JSON: "),
        ("[]", json, "the body is no JSON object"),
        ("{}", {"Content-Type": "text/plain"}, "its Content-Type is not application/json"),
    ):
        error = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers).json()["error"]
        assert told in error["message"] and error["param"] is None


def test_a_prompt_that_is_too_long_has_openais_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": "x " * small_llm.CONTEXT}])
    assert caught.value.code == "context_length_exceeded"


def test_requests_have_to_be_addressed_to_this_machine(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    assert httpx.get(f"{server.url}/health", headers={"Host": "elsewhere.example"}).status_code == 400
