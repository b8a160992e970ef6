"""Ollama's API, as its clients use it."""

import json

import httpx
import pytest
from scripted import CALL, TEMPLATE, TOOLS, scripted
from served import NAME

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(chat_program):
    with scripted(chat_program, "{% if enable_thinking %}[think]{% endif %}" + TEMPLATE) as server:
        yield server


@pytest.fixture(autouse=True)
def unscripted(server):
    server.text = server.limit = None


def post(server, path: str, **fields) -> httpx.Response:
    return httpx.post(f"{server.url}/api/{path}", json={"model": NAME} | fields)


def lines(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines() if line]


def test_chat(server):
    server.text = "<think>\nHm.\n</think>\n\nHello there."
    whole = post(server, "chat", messages=HI, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello there.", "thinking": "Hm.\n"}
    assert (whole["model"], whole["done"], whole["done_reason"]) == (NAME, True, "stop")
    assert whole["eval_count"] > 5 and whole["prompt_eval_count"] > 1 and whole["total_duration"] > 0
    *parts, last = lines(post(server, "chat", messages=HI, model=f"{NAME}:latest"))
    assert "".join(part["message"]["content"] for part in parts) == "Hello there."
    assert "".join(part["message"].get("thinking", "") for part in parts) == "Hm.\n"
    assert last["done"] and last["message"] == {"role": "assistant", "content": ""} and last["eval_count"] > 5
    assert not any(part["done"] for part in parts)


def test_tools_and_their_results(server):
    server.text = CALL
    call = {"index": 0, "name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
    whole = post(server, "chat", messages=HI, tools=TOOLS, stream=False).json()["message"]
    assert [entry["function"] for entry in whole["tool_calls"]] == [call] and whole["content"] == ""
    first, _ = lines(post(server, "chat", messages=HI, tools=TOOLS))
    assert [entry["function"] for entry in first["message"]["tool_calls"]] == [call]
    asked = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    result = {"role": "tool", "content": "sunny", "tool_name": "get_weather"}
    server.text = "Sunny."
    answer = post(server, "chat", messages=[*HI, asked, result, *HI], tools=TOOLS, stream=False).json()
    assert answer["message"]["content"] == "Sunny."
    assert '<tool_call>{"city": "Oslo", "days": 2}</tool_call>[tool]sunny[user]Hi' in server.prompts[-1]


def test_generate(server):
    server.text = "Hello."
    assert post(server, "generate", prompt="Hi", system="S", stream=False).json()["response"] == "Hello."
    assert server.prompts[-1] == "[system]S[user]Hi[assistant]"
    *parts, last = lines(post(server, "generate", prompt="Hi", raw=True))
    assert "".join(part["response"] for part in parts) == "Hello." and last["done_reason"] == "stop"
    assert server.prompts[-1].endswith("Hi") and "[user]" not in server.prompts[-1]
    assert post(server, "generate", stream=False).json()["done_reason"] == "load"
    assert lines(post(server, "chat"))[-1]["done_reason"] == "load"


def test_options(server):
    options = {"temperature": 0, "num_predict": 4, "num_ctx": 4096, "stop": ["~"], "repeat_penalty": 1.5, "seed": 1}
    answer = post(server, "chat", messages=HI, options=options, keep_alive="5m", stream=False, think=True).json()
    assert (answer["eval_count"], answer["done_reason"]) == (4, "length")
    assert server.prompts[-1].startswith("[think]")
    fields = {"temperature": 0, "max_tokens": 4, "repetition_penalty": 1.5, "messages": HI, "enable_thinking": True}
    other = httpx.post(f"{server.url}/v1/chat/completions", json={"model": NAME, "stop": ["~"]} | fields).json()
    assert answer["message"]["content"] == other["choices"][0]["message"]["content"]
    entries = post(server, "chat", messages=HI, options=options, stream=False, logprobs=True, top_logprobs=2).json()
    assert [len(entry["top_logprobs"]) for entry in entries["logprobs"]] == [2] * 4


def test_format(server):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    content = post(server, "chat", messages=HI, format=schema, stream=False).json()["message"]["content"]
    assert json.loads(content).keys() == {"ok"}
    assert post(server, "generate", prompt="x", format={"not": {}}).json()["error"].startswith("format: ")


def test_models(server):
    (model,) = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert model["name"] == model["model"] == NAME and model["details"]["format"] == "pte"
    assert httpx.get(f"{server.url}/api/ps").json()["models"][0]["name"] == NAME
    shown = post(server, "show").json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"] and "[user]" not in shown["template"]
    assert shown["model_info"]["pte.context_length"] == server.llm.program.max_context_len
    assert httpx.get(f"{server.url}/api/version").json()["version"].count(".") == 2


def test_requests_need_no_content_type_unless_a_web_page_sends_them(server):
    server.text = "Hello."
    content = json.dumps({"model": NAME, "messages": HI, "stream": False})
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{server.url}/api/chat", content=content, headers=headers).json()
    assert answer["message"]["content"] == "Hello."
    headers = {"Content-Type": "text/plain", "Origin": "https://elsewhere.example"}
    assert httpx.post(f"{server.url}/api/chat", content=content, headers=headers).status_code == 400


def test_errors(server):
    for fields, status, message in (
        ({"model": "other"}, 404, "model: got 'other', which does not exist"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role: got"),
        ({"messages": HI, "options": {"mirostat": 2}}, 400, "mirostat: got a value that this server does not support"),
        ({"messages": [HI[0] | {"images": ["x"]}]}, 400, "messages: the model"),
    ):
        response = post(server, "chat", **{"messages": HI} | fields)
        assert response.status_code == status and response.json().keys() == {"error"}
        assert response.json()["error"].startswith(message)
