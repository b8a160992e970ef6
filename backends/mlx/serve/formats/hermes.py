"""The format of Hermes and Qwen: `<tool_call>` with a JSON object, or with the XML of Qwen3-Coder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import json_calls
from .base import CALLS, AnswerFormat, Section
from .reader import CallReader, Reading, json_or_text, json_text, overlap

INSTRUCTIONS = """\
You can call functions. Their signatures are here, one JSON object per line:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as a JSON object between tags:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""


class Hermes(AnswerFormat):
    name = "hermes"
    trigger: str | None = "<tool_call>"

    def call_sections(self) -> Sequence[Section]:
        return (Section("<tool_call>", "</tool_call>", CALLS),)

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        if not (yield from reader.take("<function=")):
            yield from json_calls.read_several(reader)
            return
        yield from read_xml(reader)
        while (yield from reader.take("<function=")):
            yield from read_xml(reader)

    def call_template(self, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"

    def instructions(self, functions: Sequence[Mapping[str, Any]]) -> str:
        tools = "\n".join(json.dumps({"type": "function", "function": dict(f)}, ensure_ascii=False) for f in functions)
        return INSTRUCTIONS.format(tools=tools)


# The XML of Qwen3-Coder: <function=name><parameter=key>value</parameter>…</function>, after <function= ---------------

VALUE_END = "</parameter>"
_NUMBER_BEGINNING = re.compile(r"-?\d*\.?\d*([eE][+-]?\d*)?")


def read_xml(reader: CallReader, parameter: str = "<parameter=", end: str = "</function>") -> Reading[None]:
    """Read a call behind the tag of its function, up to `end`. `parameter`: the beginning of the tags of arguments."""
    reader.begin(_xml_name((yield from reader.take_until(">"))))
    before = "{"
    while not (yield from reader.take(end)):
        if reader.is_closed and not (yield from reader.peek()):
            break  # models leave the last tag out
        yield from reader.expect(parameter)
        key = _xml_name((yield from reader.take_until(">")))
        reader.write(f"{before}{json_text(key)}: ")
        before = ", "
        yield from tagged_value(reader, reader.is_text(key), VALUE_END)
    reader.write("" if before == ", " else "{")
    reader.end()


def _xml_name(text: str) -> str:
    """Return the name in a tag, which some models write in quotes."""
    name = text.strip("\"'")
    if not name or re.search(r"\s", name):
        raise ValueError(f"got the name {text!r}, expected one without space")
    return name


def tagged_value(reader: CallReader, is_text: bool, end: str) -> Reading[None]:
    """Read a value and its closing tag `end`. With `is_text`, or if the value is not JSON, it becomes a JSON string.

    Such a string goes out as it comes.
    """
    while not reader.ahead:
        yield from reader.more(end)
    if reader.next_char == "\n":
        reader.position += 1
    while not is_text and (length := reader.ahead.find(end)) < 0:
        is_text = not _may_be_json(reader.ahead[: len(reader.ahead) - overlap(reader.ahead, end)])
        if not is_text:
            yield from reader.more(end)
    if is_text:
        reader.write('"')
        yield from reader.send_string_until(("\n" + end, end))
        reader.write('"')
    else:
        reader.write(json_or_text(reader.ahead[:length].removesuffix("\n")))
        reader.position += length + len(end)
    reader.send()


def _may_be_json(beginning: str) -> bool:
    """Whether a text with this beginning may be JSON."""
    text = beginning.strip()
    if not text or text[0] in '"[{' or _NUMBER_BEGINNING.fullmatch(text):
        return True
    return any(word.startswith(text) for word in ("true", "false", "null"))
