"""Tool calls of an answer that arrives in pieces.

The parser sends parts of a call as early as it can. Joined, the parts must not depend on where the pieces end.
"""

import json

import pytest
from executorch_mlx.serve.formats import FORMATS
from executorch_mlx.serve.formats.detect import THINK
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serve_formats import NAMES, joined

FIXED_EXAMPLES = settings(max_examples=60, deadline=None, database=None, derandomize=True)
FUNCTIONS = {name: {"properties": {"text": {"type": "string"}}} for name in NAMES}
# No text of these characters is a tag.
TEXTS = st.text("ab {}[]()<>\"'\\,:=#\n\té\U0001f600", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.sampled_from([0.5, -1e300]) | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=2),
    max_leaves=6,
)
KEYS = st.sampled_from(["city", "text", "a_1"])
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
SOME_UNKNOWN = st.lists(st.tuples(st.sampled_from([*NAMES, "unknown"]), ARGUMENTS), min_size=1, max_size=3)


def as_json(name, arguments, key="arguments", **options):
    return json.dumps({"name": name, key: arguments}, **options)


def as_xml(name, arguments):
    values = {key: v if isinstance(v, str) else json.dumps(v) for key, v in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>\n"


def as_python(name, arguments):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def as_tagged(name, arguments):
    return f"<|tool_call>call:{name}{tagged(arguments)}<tool_call|>"


def tagged(value):
    if isinstance(value, dict):
        keys = [key if key.replace("_", "").isalnum() else tagged(key) for key in value]
        return "{" + ",".join(f"{key}:{tagged(v)}" for key, v in zip(keys, value.values())) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(tagged, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


# Name: (format, function that writes calls as text).
WRITERS = {
    "hermes": ("hermes", lambda calls: "\n".join(f"<tool_call>{as_json(*call)}\n</tool_call>" for call in calls)),
    "hermes list": ("hermes", lambda calls: f"<tool_call>[{', '.join(as_json(*c) for c in calls)}]</tool_call>"),
    "hermes string": (
        "hermes",
        lambda calls: "".join(
            f"<tool_call>{as_json(name, json.dumps(arguments))}</tool_call>" for name, arguments in calls
        ),
    ),
    "qwen xml": ("hermes", lambda calls: "".join(as_xml(*call) for call in calls)),
    "llama": ("llama3", lambda calls: "; ".join(as_json(*call, key="parameters") for call in calls)),
    "llama, tag": ("llama3", lambda calls: "<|python_tag|>" + "".join(as_json(*call, indent=1) for call in calls)),
    "llama, function": (
        "llama3",
        lambda calls: "".join(f"<function={name}>{json.dumps(arguments)}</function>" for name, arguments in calls),
    ),
    "llama 4": ("llama3", lambda calls: f"<|python_tag|>[{', '.join(as_python(*call) for call in calls)}]"),
    "mistral": ("mistral", lambda calls: f"[TOOL_CALLS][{', '.join(as_json(*c, ensure_ascii=False) for c in calls)}]"),
    "mistral 11": (
        "mistral-named",
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls),
    ),
    "gemma 3": ("gemma", lambda calls: f"```tool_code\n[{', '.join(as_python(*call) for call in calls)}]\n```"),
    "gemma 4": ("gemma-tags", lambda calls: "".join(as_tagged(*call) for call in calls)),
    "harmony": (
        "harmony",
        lambda calls: "".join(
            f"<|channel|>commentary to=functions.{name}<|message|>{json.dumps(arguments)}<|call|>"
            for name, arguments in calls
        ),
    ),
}


def parts_of(format: str, text: str, cuts=()) -> list:
    """The parts that a parser returns for a text that arrives in pieces. A piece ends at each position of `cuts`."""
    parser = FORMATS[format]([THINK["</think>"]]).parser(FUNCTIONS, "<|start|>assistant" if format == "harmony" else "")
    ends = [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends)]
    return [part for piece in pieces for part in parser.feed(piece)] + parser.end()


def check_all_pieces(format: str, text: str, cuts: list[int]) -> dict:
    """Check that the joined parts do not depend on the pieces of the text, and return them."""
    whole = joined(parts_of(format, text))
    assert joined(parts_of(format, text, cuts)) == whole
    assert joined(parts_of(format, text, range(len(text)))) == whole
    return whole


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


CUTS = st.lists(st.integers(0, 2000), max_size=8)


@pytest.mark.parametrize("name", WRITERS)
@FIXED_EXAMPLES
@given(calls=CALLS, cuts=CUTS)
def test_calls_do_not_depend_on_the_pieces(name, calls, cuts):
    format, write = WRITERS[name]
    found = check_all_pieces(format, write(calls), cuts)
    if name == "qwen xml":  # this format has no quotes, so the parser reads a text that is JSON as JSON
        calls = [(name, {key: as_typed(name, key, value) for key, value in call.items()}) for name, call in calls]
    assert [(name, json.loads(arguments)) for name, arguments in found.pop("calls")] == calls
    assert not found


def as_typed(name, key, value):
    if key == "text" and name in FUNCTIONS:  # the schema says that `text` is a string
        return value if isinstance(value, str) else json.dumps(value)
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


EDITS = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.integers(0, 3) | st.integers(0, 2000),
        st.sampled_from(
            [
                "",
                "}",
                "{",
                '"',
                "'",
                "\\",
                ",",
                ")",
                "]",
                "# ",
                '"""',
                '"name"',
                "NaN",
                '"\\ud800"',
                "</tool_call>",
                "<parameter=x>",
                "</parameter>",
                "</function>",
                "[TOOL_CALLS]",
                '<|"|>',
                "<|call|>",
                "```",
            ]
        ),
    ),
    min_size=1,
    max_size=2,
)


@pytest.mark.parametrize("name", WRITERS)
@FIXED_EXAMPLES
@given(calls=SOME_UNKNOWN, cuts=CUTS, edits=EDITS)
def test_damaged_calls_do_not_depend_on_the_pieces_and_never_look_complete(name, calls, cuts, edits):
    format, write = WRITERS[name]
    text = write(calls)
    for position, removed, inserted in edits:
        position %= len(text) + 1
        text = text[:position] + inserted + text[position + removed :]
    check_all_pieces(format, text, cuts)
    parts = parts_of(format, text, cuts)
    assert {text for kind, text in parts if kind == "call"} <= FUNCTIONS.keys()
    begun = [index for index, (kind, _) in enumerate(parts) if kind == "call"]
    for begin, end in zip(begun, [*begun[1:], len(parts)]):
        ((_, arguments),) = joined(parts[begin:end])["calls"]
        assert is_object(arguments) == (("call_end", "") in parts[begin:end])
    json.dumps(parts, ensure_ascii=False).encode()  # no lone surrogates


# Name: (format, beginning of an answer, the arguments that the parser has returned by then).
# None: the parser has not returned the call.
BEGINNINGS = {
    "hermes": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "Os', '{"a": "Os'),
    "hermes, brace": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1'),
    "hermes, other order": ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"', None),
    "hermes, no JSON": ("hermes", """<tool_call>{"name": "f", "arguments": {'a""", None),
    "end of a section": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "Os</tool_', '{"a": "Os'),
    "qwen xml": ("hermes", "<tool_call><function=f>\n<parameter=a>\n3\n</parameter>", '{"a": 3'),
    "qwen xml, text": ("hermes", "<tool_call><function=f><parameter=b>\nOslo\nis\n</par", '{"b": "Oslo\\nis'),
    "qwen xml, perhaps JSON": ("hermes", "<tool_call><function=f><parameter=b>[1, 2", None),
    "qwen xml, text by the schema": ("hermes", "<tool_call><function=f><parameter=text>[1, 2", '{"text": "[1, 2'),
    "llama": ("llama3", '{"name": "f", "parameters": {"a": [1, {', '{"a": [1, {'),
    "llama 4": ("llama3", '[f(a="x", b="y', '{"a": "x"'),
    "mistral": ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "Os', '{"a": "Os'),
    "mistral 11": ("mistral-named", '[TOOL_CALLS]f[ARGS]{"a": "Os', '{"a": "Os'),
    "gemma 4": ("gemma-tags", '<|tool_call>call:f{a:1,s:<|"|>Os', '{"a": 1, "s": "Os'),
    "harmony": ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": "Os', '{"a": "Os'),
}


@pytest.mark.parametrize("format, text, expected", BEGINNINGS.values(), ids=BEGINNINGS)
def test_arguments_are_returned_before_their_end(format, text, expected):
    parser = FORMATS[format]().parser(FUNCTIONS, "<|start|>assistant" if format == "harmony" else "")
    parts = [part for character in text for part in parser.feed(character)]
    assert joined(parts) == ({} if expected is None else {"calls": [("f", expected)]})


def test_call_of_an_unknown_function_is_content_before_its_end():
    text = '<tool_call>{"name": "unknown", "arguments": {"a": "Os'
    parser = FORMATS["hermes"]().parser(FUNCTIONS, "")
    assert joined([part for character in text for part in parser.feed(character)]) == {"content": text}


def test_text_after_a_malformed_call_is_content():
    text = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> Hi'
    assert joined(parts_of("hermes", text)) == {"calls": [("f", '{"a": oops')], "content": "}}</tool_call> Hi"}
