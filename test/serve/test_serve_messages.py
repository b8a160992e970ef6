"""`/v1/messages`, Anthropic's API. Its package calls the server in test_serve_clients.py."""

import json

import httpx
import pytest
import served
import small_llm
from scripted import CALL, CLOCK, TEMPLATE, WEATHER, scripted, scripted_server, unscripted  # noqa: F401 (fixtures)
from served import NAME

# A template that can turn reasoning off, and takes a system message only at the beginning.
LATER = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
THINKING = "{% if enable_thinking %}[think]{% endif %}" + TEMPLATE.replace("[{{ message", LATER + "[{{ message")
HELLO = {"role": "user", "content": "Hi"}
TOOLS = [{"name": f["name"], "input_schema": f["parameters"]} for f in (WEATHER, CLOCK)]
ARGUMENTS = {"city": "Oslo", "days": 2}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.example"}}
NOT = {"name": "bad", "input_schema": {"not": {}}}


def post(server, path="/v1/messages", headers=None, **fields):
    body = {"model": NAME, "messages": [HELLO], "max_tokens": 60} | fields
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=300)


def create(server, **fields):
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server, **fields):
    """Return the events of a streamed message. The name of each is its type."""
    events = []
    for text in post(server, stream=True, **fields).text.split("\n\n")[:-1]:
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events):
    """Return the message that the events of a stream make, as Anthropic's package joins them."""
    message, parts = events[0]["message"], {}
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            parts[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            (text,) = (text for name, text in event["delta"].items() if name != "type")
            parts[event["index"]] += text
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            key = {"tool_use": "input"}.get(block["type"], block["type"])
            block[key] = json.loads(parts[event["index"]]) if key == "input" else parts[event["index"]]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert events[-1] == {"type": "message_stop"}
    return message


def without_ids(message):
    usage = message["usage"]
    prompt = usage.pop("input_tokens") + usage.pop("cache_read_input_tokens")  # the cache holds different parts
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return message | {"id": None, "content": content, "prompt": prompt}


def test_text(server):
    server.text = "Hello."
    message = create(server, system="Be kind.", metadata={"user_id": "u"}, service_tier="auto")
    assert message["content"] == [{"type": "text", "text": "Hello."}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", NAME)
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert server.prompts[-1] == "[system]Be kind.[user]Hi[assistant]"
    usage = message["usage"]
    ids = server.llm.encode(server.prompts[-1], special=False)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(ids)
    assert usage["output_tokens"] == len(server.llm.encode("Hello.", special=False)) + 1


def test_stream_and_whole_message_are_equal(server):
    server.text = "<think>hm</think>Let me see." + CALL + CALL + "Done."
    events = stream(server, tools=TOOLS)
    assert events[0]["message"]["usage"]["input_tokens"] == len(server.llm.encode(server.prompts[-1], special=False))
    message = joined(events)
    kinds = ["thinking", "text", "tool_use", "tool_use", "text"]
    assert [block["type"] for block in message["content"]] == kinds and message["stop_reason"] == "tool_use"
    assert message["content"][2]["input"] == ARGUMENTS and message["content"][0]["thinking"] == "hm"
    assert without_ids(create(server, tools=TOOLS)) == without_ids(message)
    pieces = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", {})]
    assert len(pieces) > 2
    shown = joined(stream(server, tools=TOOLS, thinking={"type": "adaptive", "display": "omitted"}))
    assert shown["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert shown["content"][1:] != [] and shown["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_reasons_why_answers_end(server):
    server.text = "Hello there."
    message = create(server, stop_sequences=["x", "there"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "there")
    assert message["content"][0]["text"] == "Hello "
    assert joined(stream(server, stop_sequences=["there"]))["stop_sequence"] == "there"
    server.text = None
    assert create(server, max_tokens=2)["stop_reason"] == "max_tokens"
    server.text = "Hi " * small_llm.CONTEXT
    assert create(server, max_tokens=10**6)["stop_reason"] == "model_context_window_exceeded"


def test_calls_and_their_results_come_back(server):
    server.text = "Let me see." + CALL
    first = create(server, tools=TOOLS)
    call = first["content"][1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
    failed = result | {"content": "no such city", "is_error": True}
    mark = {"cache_control": {"type": "ephemeral"}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "abc"}
    answer = [thinking, {"type": "redacted_thinking", "data": "x"}, *first["content"]]
    texts = [{"type": "text", "text": "And"} | mark, {"type": "text", "text": "now?"}]
    turns = [HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": [result, failed, *texts]}]
    server.text = "It rains."
    assert create(server, messages=turns, tools=[TOOLS[0] | mark, TOOLS[1]])["content"][0]["text"] == "It rains."
    said = '[assistant]Let me see.<tool_call>{"city": "Oslo", "days": 2}</tool_call>'
    end = f"[user]Hi{said}[tool]rain[tool]Error: no such city[user]And\n\nnow?[assistant]"
    assert server.prompts[-1].endswith(end)


def test_adjacent_messages_of_a_role_are_one_turn_and_the_last_one_is_continued(server):
    server.text = " there."
    begun = [HELLO, {"role": "user", "content": "You"}, {"role": "assistant", "content": "Hello"}]
    assert create(server, messages=begun)["content"][0]["text"] == " there."
    assert server.prompts[-1] == "[user]Hi\n\nYou[assistant]Hello"


@pytest.mark.parametrize(
    "choice, kinds",
    [
        ({"type": "any"}, ["tool_use"]),
        ({"type": "tool", "name": "get_weather"}, ["tool_use"]),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["tool_use"]),
        ({"type": "auto"}, ["tool_use", "tool_use"]),
        ({"type": "none"}, ["text"]),
    ],
)
def test_tool_choice(server, choice, kinds):
    pytest.importorskip("llguidance")
    is_forced = choice["type"] in ("any", "tool")
    server.text = None if is_forced else CALL + CALL
    choice = choice | {"disable_parallel_tool_use": True} if is_forced else choice
    message = create(server, tools=TOOLS[:1], tool_choice=choice, max_tokens=120, seed=1)
    assert [block["type"] for block in message["content"]] == kinds
    assert message["content"][-1].get("input", {}).keys() == (set() if kinds == ["text"] else ARGUMENTS.keys())


def test_arguments_that_were_cut_off_are_no_arguments(server):
    server.text = CALL
    server.limit = len(server.llm.encode(CALL[: CALL.index("slo")], special=False))
    message = create(server, tools=TOOLS)
    assert message["stop_reason"] == "max_tokens"
    (text,) = message["content"][0]["input"].values()
    assert message["content"][0]["input"] == {"INVALID_JSON": text} and text.startswith('{"city"')


def test_arguments_without_a_form_in_json(server):
    """Python reads an infinite number and the half of an emoji, but a response cannot have them."""
    for value, expected in (("1e999", {"INVALID_JSON": '{"a": 1e999}'}), ('"\\ud83d"', {"a": "\ufffd"})):
        server.text = f'<tool_call>\n{{"name": "now", "arguments": {{"a": {value}}}}}\n</tool_call>'
        assert create(server, tools=TOOLS)["content"][0]["input"] == expected


def test_schema_of_the_output(server):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    message = create(server, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(message["content"][0]["text"]).keys() == {"a"}


def test_rules_for_tokens(server):
    """As in the other APIs."""
    rules = {"allowed_token_ids": [300, 301], "min_tokens": 9, "bad_words": [server.llm.text([301])]}
    assert create(server, max_tokens=9, **rules)["content"][0]["text"] == server.llm.text([300] * 9)
    pytest.importorskip("llguidance")
    assert create(server, structured_outputs={"json": {"const": 5}})["content"][0]["text"] == "5"
    output = {"format": {"type": "json_schema", "schema": {}}}
    response = post(server, output_config=output, bad_words=["a"]).json()
    assert response["error"]["message"].startswith("output_config.format: got it together with bad_words")


def test_count_tokens(server):
    server.text = "Hello."
    fields = {"tools": TOOLS, "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]}
    usage = create(server, **fields)["usage"]
    count = post(server, "/v1/messages/count_tokens", max_tokens=None, **fields).json()
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert "[system]Be\n\nkind.[user]" in server.prompts[-1]


def test_thinking_effort_and_later_system_messages_reach_the_template(chat_program):
    """As Claude Code sends them."""
    later = [
        HELLO,
        {"role": "system", "content": "Agents: none."},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "One."},
        {"role": "user", "content": "Two."},
    ]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    with scripted(chat_program, THINKING) as server:
        server.text = "Hello."
        prompts = []
        for thinking in (None, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 9}, {"type": "disabled"}):
            create(server, thinking=thinking, context_management=edits, max_tokens=9)
            prompts.append(server.prompts[-1])
        assert prompts[1:3] == ["[think][user]Hi[assistant]"] * 2 and not prompts[0].startswith("[think]")
        create(server, messages=later, output_config={"effort": "high"}, system="S")
    turns = "[system]S[user]Hi\n\nAgents: none.[assistant]Hello.[user]One.\n\nTwo."
    assert server.prompts[-1] == f"{turns}[effort high][assistant]"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"messages": []}, "messages: got 0 items"),
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"messages": [HELLO | {"content": [IMAGE]}]}, 'messages.0.content.0.source.type: got "url"'),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'messages.0.role: got "tool"'),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: got"),
        ({"tools": [*TOOLS, NOT], "tool_choice": {"type": "any"}}, "tools.2.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: got it without tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: expected a name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"stop_sequences": [""]}, "stop_sequences.0: got 0 characters"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0.type"),
        ({"mirostat": 1}, "mirostat: got a value that this server does not support, expected "),
        ({"messages": [HELLO | {"content": "x " * 3000}]}, "prompt is too long: messages: got"),
    ],
)
def test_invalid_request_names_the_field(server, fields, message):
    if "tools" in fields or "output_config" in fields:
        pytest.importorskip("llguidance")
    for is_stream in (False, True):
        response = post(server, stream=is_stream, **fields)
        error = response.json()
        assert response.status_code == 400 and error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"].startswith(message) and "pydantic" not in error["error"]["message"]


def test_threads_are_refused_with_the_code_for_which_the_package_sends_all_messages(server):
    error = post(server, thread={"type": "create"}).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_errors_have_the_types_of_this_api(chat_program):
    with served.serve(chat_program, api_key="k", max_body_bytes=1000) as server:
        errors = [(post(server), 401, "authentication_error")]
        errors += [(post(server, headers={"x-api-key": key}), 401, "authentication_error") for key in ("no", "")]
        key = {"x-api-key": "k"}
        errors.append((post(server, headers=key, model="other"), 404, "not_found_error"))
        errors.append((post(server, headers=key, system="x" * 2000), 413, "request_too_large"))
        errors.append((httpx.get(f"{server.url}/v1/messages", headers=key), 405, "invalid_request_error"))
        for response, status, kind in errors:
            assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert post(server, headers=key, max_tokens=1).status_code == 200
        assert post(server, headers={"Authorization": "Bearer k"}, max_tokens=1).status_code == 200


def test_an_error_ends_the_stream(server, monkeypatch):
    def fail(self):
        raise RuntimeError("no luck")

    server.text = "Hello."
    monkeypatch.setattr("executorch_mlx.serve.answer.Choice._finish_reason", fail)
    *_, last = stream(server)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the model failed: no luck"}}
