"""The format of Hermes and Qwen: `<tool_call>` with a JSON object, or with the XML of Qwen3-Coder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .base import CALLS, AnswerFormat, Section, ToolCall

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

    def read_calls(self, text: str) -> list[ToolCall]:
        text = text.strip()
        if text.startswith("<function="):
            return [_read_xml(text)]
        value = json.loads(text)
        return [ToolCall.from_json(call) for call in (value if isinstance(value, list) else [value])]

    def call_template(self, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"

    def instructions(self, functions: Sequence[Mapping[str, Any]]) -> str:
        tools = "\n".join(json.dumps({"type": "function", "function": dict(f)}, ensure_ascii=False) for f in functions)
        return INSTRUCTIONS.format(tools=tools)


def _read_xml(text: str) -> ToolCall:
    """`<function=name><parameter=key>value</parameter>…</function>`; a value that is JSON has its type."""
    found = re.fullmatch(r"<function=([^>\s]+)>(.*?)(?:</function>)?", text, re.DOTALL)
    if not found:
        raise ValueError("expected <function=name>…</function>")
    pairs = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL)
    return ToolCall.of(found[1], {key: _xml_value(value) for key, value in pairs})


def _xml_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
