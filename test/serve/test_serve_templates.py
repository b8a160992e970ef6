"""Chat templates that take no system message or only turns that alternate, and special tokens in texts of users."""

import httpx
import pytest
from scripted import scripted
from served import NAME

# Like those of Gemma 2 and Mistral: no system message, and turns that alternate.
ALTERNATING = """\
{%- if messages[0].role == "system" %}{{ raise_exception("no system role") }}{% endif %}
{%- for message in messages %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{{- "[" + message.role + "]" + message.content | trim }}{% endfor %}{{ "[assistant]" if add_generation_prompt }}"""
# Takes any order, and leaves system messages out.
WITHOUT_SYSTEM = """\
{%- for message in messages if message.role != "system" %}[{{ message.role }}]{{ message.content }}{% endfor %}"""
TURNS = [("system", "Be kind."), ("user", "Hi"), ("user", "Are you there?"), ("assistant", "Yes"), ("assistant", ".")]
TURNS.append(("user", "Good"))
ALTERNATE = "[user]Be kind.\n\nHi\n\nAre you there?[assistant]Yes\n\n.[user]Good[assistant]"


def ask(server, api: str, messages: list[dict], **fields) -> str:
    """Send messages to an API, and return the prompt of the model."""
    given = {"input" if api == "responses" else "messages": messages}
    given |= {"max_output_tokens" if api == "responses" else "max_tokens": 1, "model": NAME}
    response = httpx.post(f"{server.url}/v1/{api}", json=given | fields)
    assert response.status_code == 200, response.text
    return server.prompts[-1]


@pytest.fixture(scope="module")
def alternating(chat_program):
    with scripted(chat_program, ALTERNATING) as server:
        yield server


@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
def test_turns_are_joined_for_a_template_that_wants_them_to_alternate(alternating, api):
    messages = [{"role": role, "content": content} for role, content in TURNS]
    joint = "" if api == "messages" else "\n\n"  # Anthropic's API itself makes one answer of two
    expected = ALTERNATE.replace("Yes\n\n.", f"Yes{joint}.")
    assert ask(alternating, api, messages) == expected
    if api == "messages":
        assert ask(alternating, api, messages[1:], system="Be kind.") == expected
    if api == "responses":
        assert ask(alternating, api, messages[1:], instructions="Be kind.") == expected
    assert ask(alternating, api, messages[3:]) == f"[user][assistant]Yes{joint}.[user]Good[assistant]"


def test_other_forms_of_system_messages(alternating):
    def prompt(*turns: str) -> str:
        roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
        return ask(alternating, "chat/completions", [{"role": roles[t[0]], "content": t} for t in turns])

    assert prompt("s1") == "[user]s1[assistant]"
    assert prompt("s1", "d2", "u") == "[user]s1\n\nd2\n\nu[assistant]"
    assert prompt("u1", "s", "u2") == "[user]u1\n\ns\n\nu2[assistant]"
    assert prompt("u1", "a", "s", "u2") == "[user]u1[assistant]a[user]s\n\nu2[assistant]"
    assert prompt("s", "a", "u") == "[user]s[assistant]a[user]u[assistant]"


def test_tools_without_a_system_role(alternating):
    tool = {"type": "function", "function": {"name": "now"}}
    prompt = ask(alternating, "chat/completions", [{"role": "user", "content": "Hi"}], tools=[tool])
    assert prompt.startswith("[user]You can call functions.") and prompt.endswith("\n\nHi[assistant]")
    schema = '"parameters": {"type": "object", "properties": {}, "additionalProperties": false}'
    assert schema in prompt  # a function without parameters takes none


def test_answers_can_be_continued(alternating):
    messages = [{"role": role, "content": content} for role, content in TURNS[:5]]
    fields = {"continue_final_message": True}
    assert ask(alternating, "chat/completions", messages, **fields) == ALTERNATE.removesuffix("[user]Good[assistant]")


def test_a_system_message_that_the_template_leaves_out_becomes_the_users(chat_program):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "user", "content": "V"}]
    with scripted(chat_program, WITHOUT_SYSTEM) as server:
        assert ask(server, "chat/completions", messages) == "[user]S\n\nU[user]V"


# Special tokens ------------------------------------------------------------------------

PLAIN = "{%- for m in messages %}{{ bos_token }}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def special(chat_program):
    with scripted(chat_program, PLAIN, special=("<|end|>", "<think>", "</think>")) as server:
        ids = []
        generate = server.llm.generate
        server.llm.generate = lambda prompt, **fields: ids.append(prompt) or generate(prompt, **fields)
        server.ids = ids
        yield server


@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
def test_special_tokens_of_a_user_are_text(special, api):
    names = special.llm.tokenizer.special_ids
    text = "a</s><|end|>b <<|end|>|end|> <|end|"
    content = [{"role": "user", "content": text}]
    prompt = ask(special, api, content)
    own = [id for id in special.ids[-1] if id in names]
    assert len(own) == 1 and prompt == f"[user]{text}</s>"
    assert special.llm.text(special.ids[-1]) == f"[user]{text}"
    ask(special, api, content, parse_special=True)
    assert len([id for id in special.ids[-1] if id in names]) == 4
    if api == "messages":
        body = {"model": NAME, "messages": content, "max_tokens": 1}
        count = httpx.post(f"{special.url}/v1/messages/count_tokens", json=body).json()["input_tokens"]
        ask(special, api, content)
        assert count == len(special.ids[-1])


def test_special_tokens_in_prompts_of_completions(special):
    body = {"model": NAME, "prompt": "a<|end|>b", "max_tokens": 1}
    counts = []
    for fields in ({}, {"parse_special": False}):
        assert httpx.post(f"{special.url}/v1/completions", json=body | fields).status_code == 200
        counts.append(sum(id in special.llm.tokenizer.special_ids for id in special.ids[-1]))
        assert special.llm.tokenizer.decode(special.ids[-1]).endswith("a<|end|>b")
    assert counts[1] == counts[0] - 1


def test_tags_of_reasoning_in_answers_that_come_back_stay(chat_program):
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    with scripted(chat_program, template, special=("<think>", "</think>")) as server:
        messages = [{"role": "user", "content": "a</think>b"}, {"role": "assistant", "content": "<think>x</think>c"}]
        assert ask(server, "chat/completions", [*messages, {"role": "user", "content": "d"}]) == "a</think>bcd"
