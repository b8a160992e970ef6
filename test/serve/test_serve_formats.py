"""The parsers of tool calls and reasoning, with answers in the form that each family of models writes."""

import json

import pytest
from executorch_mlx.serve.formats import FORMATS, detect
from executorch_mlx.serve.formats.detect import THINK

NAMES = ("f", "get_weather")


def parse(format: str, text: str, size: int, opening: str = "", names=NAMES, think: str = "</think>") -> dict:
    """The joined parts of an answer that arrives in pieces of `size` characters."""
    parser = FORMATS[format]([THINK[think]]).parser(dict.fromkeys(names, {}), opening)
    parts = [part for start in range(0, len(text), size) for part in parser.feed(text[start : start + size])]
    found = joined(parts + parser.end())
    if "calls" in found:
        found["calls"] = [(name, json.loads(arguments)) for name, arguments in found["calls"]]
    return found


def joined(parts) -> dict:
    """The parts of an answer, joined by kind. `calls` are pairs of a name and arguments."""
    found = {"reasoning": "", "content": "", "calls": []}
    for kind, text in parts:
        if kind == "call":
            found["calls"].append((text, ""))
        elif kind == "arguments":
            name, arguments = found["calls"][-1]
            found["calls"][-1] = (name, arguments + text)
        elif kind != "call_end":
            found[kind] += text
    return {kind: value for kind, value in found.items() if value}


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
QWEN_XML = (
    "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n</function>\n"
    "</tool_call>"
)
F = ("f", {"a": 1})  # what `CALL` is parsed to
# Name: (format, answer, parts).
ANSWERS = {
    "text": ("hermes", "Hello <b>you</b>", {"content": "Hello <b>you</b>"}),
    "hermes": ("hermes", f"Hi {CALL}\n{CALL}", {"content": "Hi ", "calls": [F, F]}),
    "hermes without an end": ("hermes", CALL[:-12], {"calls": [F]}),
    "hermes parameters": ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', {"calls": [F]}),
    "hermes string arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        {"calls": [F]},
    ),
    "hermes NaN": (
        "hermes",
        CALL.replace("1", "NaN").replace('{"a": NaN}', '"{\\"a\\": NaN}"'),
        {"content": CALL.replace("1", "NaN").replace('{"a": NaN}', '"{\\"a\\": NaN}"')},
    ),
    "glm": (
        "glm",
        "I look.<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>"
        "<arg_value>x\ny</arg_value></tool_call><tool_call>get_weather</tool_call>",
        {"content": "I look.", "calls": [("f", {"a": 1, "b": "x\ny"}), ("get_weather", {})]},
    ),
    "deepseek": (
        "deepseek",
        'Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        {"content": "Hi", "calls": [F, ("f", {})]},
    ),
    "deepseek v3": (
        "deepseek-v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        {"calls": [F]},
    ),
    "lfm2": ("lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Hi", {"content": "Hi", "calls": [F]}),
    "cohere": (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n    '
        '{"tool_call_id": "1", "tool_name": "get_weather", "parameters": {}}\n]<|END_ACTION|>',
        {"calls": [F, ("get_weather", {})]},
    ),
    "kimi": (
        "kimi",
        'Hi<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_call_begin|>get_weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        {"content": "Hi", "calls": [F, ("get_weather", {})]},
    ),
    "minimax": (
        "minimax",
        'Hi\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n<parameter name="b">x\ny'
        '</parameter>\n</invoke>\n<invoke name="get_weather">\n</invoke>\n</minimax:tool_call>',
        {"content": "Hi\n", "calls": [("f", {"a": 1, "b": "x\ny"}), ("get_weather", {})]},
    ),
    "minimax, forced": (
        "minimax",
        '<minimax:tool_call>{"name": "f", "arguments": {"a": 1}}</minimax:tool_call>',
        {"calls": [F]},
    ),
    "minimax m1": (
        "minimax-m1",
        '<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "get_weather", "arguments": {}}\n</tool_calls>',
        {"calls": [F, ("get_weather", {})]},
    ),
    "seed": ("seed", QWEN_XML.replace("tool_call>", "seed:tool_call>"), {"calls": [("f", {"a": 3, "b": "x\ny"})]}),
    "granite": (
        "granite",
        'Hi<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]',
        {"content": "Hi", "calls": [F, ("get_weather", {})]},
    ),
    "phi": ("phi", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', {"calls": [F]}),
    "phi, functools": ("phi", 'functools[{"name": "f", "arguments": {"a": 1}}]', {"calls": [F]}),
    "phi, no call": ("phi", "Use functools.cache.", {"content": "Use functools.cache."}),
    "granite, no call": ("granite", "a <|tool_call|>b", {"content": "a <|tool_call|>b"}),
    "cohere content": (
        "cohere",
        "<|START_RESPONSE|>Hi <think>you</think> [1]<|END_RESPONSE|>",
        {"content": "Hi <think>you</think> [1]"},
    ),
    "cohere text": ("cohere", "<think>hm</think><|START_TEXT|>Hi<|END_TEXT|>\n", {"reasoning": "hm", "content": "Hi"}),
    "cohere without tags": ("cohere", "Hi <|START_", {"content": "Hi <|START_"}),
    "hermes, a tag in a string": (
        "hermes",
        CALL.replace("1", r'"\"</tool_call>"') + f"\n{CALL}Hi",
        {"content": "Hi", "calls": [("f", {"a": '"</tool_call>'}), F]},
    ),
    "qwen xml": ("hermes", QWEN_XML, {"calls": [("f", {"a": 3, "b": "x\ny"})]}),
    "no call": ("hermes", "a <tool_call>b</tool_call> c", {"content": "a <tool_call>b</tool_call> c"}),
    "call of no object": ("hermes", "<tool_call>[1]</tool_call>", {"content": "<tool_call>[1]</tool_call>"}),
    "a beginning of a tag": ("hermes", "a <tool_", {"content": "a <tool_"}),
    "reasoning": ("hermes", "<think>\nhm\n</think>\n\nHi", {"reasoning": "hm\n", "content": "Hi"}),
    "reasoning and a call": ("hermes", f"<think>hm</think>\n{CALL}", {"reasoning": "hm", "calls": [F]}),
    "reasoning without an end": ("hermes", "<think>hm", {"reasoning": "hm"}),
    "reasoning after space, twice": (
        "hermes",
        "\n<think>hm</think>\n<think>hm</think>Hi",
        {"reasoning": "hmhm", "content": "\nHi"},
    ),
    "a tag of reasoning in the content": (
        "hermes",
        "<think>hm</think>The tag <think> opens <think>.",
        {"reasoning": "hm", "content": "The tag <think> opens <think>."},
    ),
    "a tag of reasoning in JSON": ("hermes", '{"tag": "<think>"}', {"content": '{"tag": "<think>"}'}),
    "a tag of reasoning after no call": (
        "hermes",
        "<tool_call>b</tool_call> <think>",
        {"content": "<tool_call>b</tool_call> <think>"},
    ),
    "llama": ("llama3", '{"name": "f", "parameters": {"a": 1}}', {"calls": [F]}),
    "llama, two": (
        "llama3",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
        {"calls": [F, ("get_weather", {})]},
    ),
    "llama, tag": ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', {"calls": [F]}),
    "llama, function": ("llama3", '<function=f>{"a": 1}</function>', {"calls": [F]}),
    "llama 4": ("llama3", '[f(a=1), get_weather(city="Oslo")]', {"calls": [F, ("get_weather", {"city": "Oslo"})]}),
    "llama, JSON that is no call": ("llama3", '{"a": 1, "b": "name"}' * 9, {"content": '{"a": 1, "b": "name"}' * 9}),
    "llama, JSON with a name": (
        "llama3",
        '{"name": "Ada", "parameters": {"a": 1}}',
        {"content": '{"name": "Ada", "parameters": {"a": 1}}'},
    ),
    "llama, JSON with the name of a function": (
        "llama3",
        '{"name": "f", "age": 5}',
        {"content": '{"name": "f", "age": 5}'},
    ),
    "llama, only the name of a function": ("llama3", '{"name": "f"}', {"content": '{"name": "f"}'}),
    "llama, two, one unknown": (
        "llama3",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        {"calls": [F], "content": '; {"name": "g", "parameters": {}}'},
    ),
    "llama, list": ("llama3", "[1, 2]", {"content": "[1, 2]"}),
    "mistral": ("mistral", 'ok[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', {"content": "ok", "calls": [F]}),
    "mistral 11": (
        "mistral-named",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{}',
        {"calls": [F, ("get_weather", {})]},
    ),
    "gemma 3": ("gemma", "Sure.\n```tool_code\nprint(f(a=1))\n```", {"content": "Sure.\n", "calls": [F]}),
    "gemma 3, tags in strings": (
        "gemma",
        '```tool_code\n[f(a=\'```\', b="""x\n```""")]\n```Hi',
        {"content": "Hi", "calls": [("f", {"a": "```", "b": "x\n```"})]},
    ),
    "gemma 3, code": ("gemma", "```tool_code\nimport os\n```", {"content": "```tool_code\nimport os\n```"}),
    "function gemma": (
        "gemma-tags",
        "<start_function_call>call:f{a:<escape>x{,y<escape>,b:[1,{c:true}]}<end_function_call>",
        {"calls": [("f", {"a": "x{,y", "b": [1, {"c": True}]})]},
    ),
    "gemma 4": (
        "gemma-tags",
        '<|tool_call>call:f{a:1,s:<|"|>x<|"|>}<tool_call|>',
        {"calls": [("f", {"a": 1, "s": "x"})]},
    ),
    "gemma, broken": (
        "gemma-tags",
        "<|tool_call>call:f{a:<tool_call|>",
        {"content": "<|tool_call>call:f{a:<tool_call|>"},
    ),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        {"reasoning": "hm", "content": "Hi"},
    ),
    "harmony call": (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        {"reasoning": "hm", "calls": [F]},
    ),
    "harmony, a tag in a string": (
        "harmony",
        ' to=functions.f<|channel|>commentary json<|message|>{"a": "<|end|>"}<|call|>',
        {"calls": [("f", {"a": "<|end|>"})]},
    ),
    "harmony, other order": ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', {"calls": [F]}),
    "harmony, broken call": ("harmony", "<|channel|>commentary to=f<|message|>{", {"content": "{"}),
    "harmony, unknown function": (
        "harmony",
        "<|channel|>analysis to=python<|message|>1<|end|><|start|>assistant to=functions.g<|message|>{}",
        {"reasoning": "1", "content": "{}"},
    ),
    "harmony preamble": ("harmony", "<|channel|>commentary<|message|>I look.<|end|>", {"content": "I look."}),
}


@pytest.mark.parametrize("format, text, expected", ANSWERS.values(), ids=ANSWERS)
def test_answer_in_pieces(format, text, expected):
    prompt = "<|start|>assistant" if format == "harmony" else ""
    for size in (1, 2, 3, 7, len(text)):
        assert parse(format, text, size, prompt) == expected, size


def test_call_whose_string_has_no_end_does_not_take_the_next_one():
    """No string of JSON or Python has a line feed, so the string ends there, and the tag after it counts."""
    for format, broken, call in (
        ("hermes", CALL.replace("1", '"x'), CALL),
        ("gemma", "```tool_code\nf(a='x)\n```", "```tool_code\nf(a=1)\n```"),
    ):
        text = f"{broken}\n{call}"
        wholes = []
        for size in (1, 3, len(text)):
            parser = FORMATS[format]().parser(dict.fromkeys(NAMES, {}), "")
            parts = [part for start in range(0, len(text), size) for part in parser.feed(text[start : start + size])]
            wholes.append(joined(parts + parser.end()))
            assert json.loads(wholes[-1]["calls"][-1][1]) == {"a": 1} and broken[-4:] in wholes[-1]["content"]
        assert wholes == [wholes[0]] * 3


def test_prompt_may_have_opened_the_reasoning():
    assert parse("hermes", "hm</think>Hi", 1, "…<think>\n") == {"reasoning": "hm", "content": "Hi"}
    assert parse("hermes", "Hi", 1, "<think>\n\n</think>\n\n") == {"content": "Hi"}
    assert parse("mistral", "[THINK]hm[/THINK]Hi", 1, think="[/THINK]") == {"reasoning": "hm", "content": "Hi"}
    text = "hm<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>"
    assert parse("cohere", text, 1, "<|START_THINKING|>", think="<|END_THINKING|>") == {
        "reasoning": "hm",
        "content": "Hi",
    }


def test_prompt_may_have_opened_the_content():
    """As that of Command A."""
    assert parse("cohere", "Hi<|END_RESPONSE|>", 1, "<|CHATBOT_TOKEN|><|START_RESPONSE|>") == {"content": "Hi"}


@pytest.mark.parametrize("format", FORMATS)
def test_calls_without_functions_are_text(format):
    text = CALL + '{"name": "f", "parameters": {}}[TOOL_CALLS]```tool_code\nf()\n```'
    assert parse(format, text, 4, names=()) == {"content": text}
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert parse("harmony", call, 4, "<|start|>assistant", names=()) == {"content": '{"a": 1}'}


@pytest.mark.parametrize("format", FORMATS)
def test_calls_of_unknown_functions_are_text(format):
    prefix, _, suffix = FORMATS[format].around_calls
    begin, end = FORMATS[format]().call_template("unknown")
    text = f'{prefix}{begin}{{"a": 1}}{end}{suffix}'
    assert parse(format, text, 3) == {"content": '{"a": 1}' if format == "harmony" else text}


@pytest.mark.parametrize("format", FORMATS)
def test_parsers_read_what_is_written(format):
    """A parser reads the calls that its format writes into prompts, and those that a grammar forces."""
    calls = [{"name": "f", "arguments": {"a": [1, "}"], "b": {"c": None}}}]
    text = FORMATS[format]().write_calls(calls)
    assert parse(format, text, 3) == {"calls": [("f", calls[0]["arguments"])]}
    begin, end = FORMATS[format]().call_template("f")
    prefix, _, suffix = FORMATS[format].around_calls
    assert parse(format, f"{prefix}{begin}{{}}{end}{suffix}", 3) == {"calls": [("f", {})]}


@pytest.mark.parametrize("format", FORMATS)
def test_calls_without_a_json_object_are_written_as_they_are(format):
    assert "[1" in FORMATS[format]().write_calls([{"name": "f", "arguments": "[1"}])


TEMPLATES = {
    "{{ x }}": "hermes",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    "[TOOL_CALLS]": "mistral",
    "[TOOL_CALLS] [ARGS]": "mistral-named",
    "<start_of_turn>model": "gemma",
    "<start_of_turn> <start_function_call>": "gemma-tags",
    "<|channel|> <|message|>": "harmony",
    "<tool_call> <arg_key>": "glm",
    "<｜tool▁calls▁begin｜>": "deepseek",
    "<｜tool▁calls▁begin｜> ```json": "deepseek-v3",
    "<|tool_list_start|>": "lfm2",
    "<|START_ACTION|>": "cohere",
    "{{ '<|tool_calls_section_begin|>' + call.id }}": "kimi",
    "{% set begin = '<minimax:tool_call>' %}{{ begin }}<think></think>": "minimax",
    "Write calls in <tool_calls></tool_calls> tags": "minimax-m1",
    "{%- set toolcall = '<seed:tool_call>' %}{{ toolcall }}": "seed",
    "<|start_of_role|>system<|end_of_role|>respond only with <|tool_call|> followed by a JSON list": "granite",
    "<|start_of_role|>system<|end_of_role|>{{ '<tool_call>' }}": "hermes",
    "{{ '<|' + message['role'] + '|><|tool|>' + message['tools'] + '<|/tool|>' }}": "phi",
}


@pytest.mark.parametrize("template, name", TEMPLATES.items())
def test_format_of_a_template(template, name):
    assert detect(template, lambda token: False).name == name
    assert detect(template, lambda token: False, "mistral").name == "mistral"
    assert detect("", {"[TOOL_CALLS]"}.__contains__).name == "mistral"


def test_unknown_format_of_a_template_with_tools_is_logged(caplog):
    assert detect("{{ tools }}", lambda token: False).name == "hermes"
    assert "the format of calls in the chat template is unknown" in caplog.text
