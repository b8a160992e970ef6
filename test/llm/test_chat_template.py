"""Chat templates give the text that transformers gives. A template that uses unsafe attributes is refused."""

import datetime

import pytest
import small_llm
from executorch_mlx.llm import LLM
from executorch_mlx.llm.chat_template import Abilities, abilities
from executorch_mlx.llm.tokenizer import Tokenizer
from transformers import AutoTokenizer

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_3 = """\
{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim %}
    {%- if loop.first %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set first = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('expected user and assistant in turns') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) }}
{{ (first if loop.first else '') + message['content'] | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content + '\\n\\n' %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + ns.system + message.content + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}"""

TOOLS = """\
{%- if tools %}
    {%- for tool in tools %}
{{ tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages recursive %}
  {{- message.role ~ ': ' ~ message.content | tojson ~ '\\n' -}}
  {%- if loop.index > 2 %}{% break %}{% endif %}
{%- endfor %}
{%- if documents is none and not undefined_name and thinking is defined %}{{ dict(a=thinking) | tojson }}{% endif -%}
{{ strftime_now('%Y') }}"""

TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA_3, "Gemma": GEMMA, "Mistral": MISTRAL, "tools": TOOLS}
TEMPLATES["small"] = small_llm.TEMPLATE

USER = {"role": "user", "content": '  Überprüfe <b>"1 & 2"</b>\n'}
CHATS = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}],
    [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes."}, USER],
]
OPTIONS = {"hint": "now", "thinking": True}


def both(template: str):
    """Return the tokenizer of the demo model, loaded by transformers and by this project, both with `template`."""
    theirs = AutoTokenizer.from_pretrained(small_llm.DEMO)
    theirs.chat_template = template
    ours = Tokenizer.from_folder(small_llm.DEMO)
    ours.chat_template = template
    return theirs, ours


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_text_is_that_of_transformers(template, options):
    theirs, ours = both(template)
    texts = set()
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
        assert ours.chat_text(chat, options) == expected
        texts.add(expected)
    assert len(texts) > 2


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("content", ["Yes", "Yes.", " Yes, ", "Yes\n", "<b>"])
def test_last_message_is_continued_as_with_transformers(template, content):
    theirs, ours = both(template)
    chat = [USER, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert ours.chat_text(chat, continue_final_message=True) == expected


def test_continued_message_has_its_content_in_the_text():
    _, ours = both("{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}")
    with pytest.raises(ValueError, match="leaves out the content of the last message"):
        ours.chat_text([USER, {"role": "assistant", "content": "Yes"}], continue_final_message=True)


def test_tools_are_those_of_transformers():
    theirs, ours = both(TOOLS)
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]
    expected = theirs.apply_chat_template(CHATS[1], tools=tools, tokenize=False, add_generation_prompt=True)
    assert '"name": "f"' in expected and ours.chat_text(CHATS[1], {"tools": tools}) == expected


def test_fields_without_a_value_are_left_out_as_with_transformers():
    """Clients send `None` for what a message does not have. A template would write it, or fail."""
    template = "{% for m in messages %}{{ m.content }}{{ m.calls | length if m.calls is defined }}{% endfor %}"
    theirs, ours = both(template)
    chat = [USER | {"calls": None}, {"role": "assistant", "content": None, "calls": [1, None]}]
    assert ours.chat_text(chat) == theirs.apply_chat_template(chat, tokenize=False) == USER["content"] + "2"


def test_time_is_the_current_one():
    _, ours = both("{{ strftime_now('%Y-%m') }}")
    months = {datetime.datetime.now().strftime("%Y-%m")}
    text = ours.chat_text([USER])
    assert text in months | {datetime.datetime.now().strftime("%Y-%m")}


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('no role robot') }}", "no role robot"),
        ("{{ messages[0].missing.more }}", "has no attribute 'missing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ dict.__globals__['x'] }}", "is unsafe"),
        ("{{ messages[0].__init__.__globals__ }}", "is unsafe"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "does not begin with an underscore"),
        ("{{ namespace(__class__=1) }}", "does not begin with an underscore"),
    ],
)
def test_failing_template_is_a_value_error(template, message):
    _, ours = both(template)
    with pytest.raises(ValueError, match=f"messages: the chat template rejected them: .*{message}"):
        ours.chat_text([USER])


def test_arguments_are_checked():
    _, ours = both(CHATML)
    with pytest.raises(ValueError, match="template_options: add_generation_prompt is reserved"):
        ours.chat_text([USER], {"add_generation_prompt": False})
    with pytest.raises(ValueError, match="messages: expected JSON values: .*object is not JSON serializable"):
        ours.chat_text([{"role": "user", "content": object()}])
    with pytest.raises(ValueError, match="messages: got 'Hi', expected a mapping with role and content"):
        ours.chat_text(["Hi"])
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_folder(small_llm.DEMO).chat_text([USER])


def test_abilities_are_those_of_the_code():
    """Comments and texts name no variables, and a variable that the template sets itself is none."""
    found = abilities(
        "{# tools </think> #}use enable_thinking {%- if not tools is defined %}{% set tools = none %}{% endif %}"
        "{% set own = 1 %}{{ own }}{% for m in messages %}{{ m['thinking'] }}{{ m.role == 'developer' }}{% endfor %}"
        "{% generation %}{{ '<think' ~ '>' }}{% endgeneration %}"
    )
    assert found.variables == {"tools", "messages"} and found.fields == {"thinking", "role"}
    assert found.has_text("<think") and found.has_text("developer") and found.has_text("use enable")
    assert not found.has_text("</think>") and not found.has_text("<think>")
    assert abilities("{% if %}") == abilities("{{ x | unknown }}") == Abilities()


def test_a_file_with_a_template_takes_the_place_of_that_of_the_model(chat_program, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    with LLM.load(chat_program, chat_template=path) as llm:
        generation = llm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=1)
        assert llm.tokenizer.decode(generation.prompt) == "<Hi>"
    path.write_text("{% for %}")
    with pytest.raises(ValueError, match="chat_template: "):
        LLM.load(chat_program, chat_template=path)


def test_special_tokens_in_messages_are_text(chat_program):
    with LLM.load(chat_program) as llm:
        special = llm.tokenizer.special_ids
        text = "a</s>b<s><s>"
        for parse_special, count in ((False, 0), (True, 3)):
            prompt = llm.chat([{"role": "user", "content": text}], max_new_tokens=1, parse_special=parse_special).prompt
            assert sum(id in special for id in prompt) == count
            assert text in llm.tokenizer.decode(prompt)


def test_a_chat_goes_on_after_a_message_without_an_answer(chat_program, tmp_path):
    """With a template that wants turns to alternate, and takes no system message."""
    path = tmp_path / "template.jinja"
    path.write_text(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    roles = [("system", "S"), ("user", "U"), ("user", "V")]
    with LLM.load(chat_program, chat_template=path) as llm:
        generation = llm.chat([{"role": role, "content": content} for role, content in roles], max_new_tokens=1)
        assert llm.tokenizer.decode(generation.prompt) == "[user]S\n\nU\n\nV"
