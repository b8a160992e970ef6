"""The formats of Mistral: `[TOOL_CALLS]` with a JSON list, or since version 11 with `name[ARGS]{…}` for each call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from .base import CALLS, Section, ToolCall
from .hermes import Hermes

TAG = "[TOOL_CALLS]"


class Mistral(Hermes):
    name = "mistral"
    trigger = None
    around_calls = (TAG + "[", ", ", "]")
    call_id_length = 9

    def call_sections(self) -> Sequence[Section]:
        return (Section(TAG, "", CALLS),)

    def markers(self) -> Sequence[str]:
        return [*super().markers(), "[ARGS]", "[CALL_ID]"]

    def read_calls(self, text: str) -> list[ToolCall]:
        text = text.strip()
        if text.startswith("["):
            values, _ = json.JSONDecoder().raw_decode(text)
            return [ToolCall.from_json(value) for value in values]
        if text.startswith("{"):
            value, _ = json.JSONDecoder().raw_decode(text)
            return [ToolCall.from_json(value)]
        return [_read_named(call) for call in text.split(TAG) if call.strip()]

    def call_template(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"


class MistralNamed(Mistral):
    """The form since version 11 of Mistral's tokenizer."""

    name = "mistral-named"
    around_calls = ("", "", "")

    def call_template(self, name: str) -> tuple[str, str]:
        return f"{TAG}{name}[ARGS]", ""


def _read_named(text: str) -> ToolCall:
    found = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*\})\s*", text, re.DOTALL)
    if not found:
        raise ValueError("expected name[ARGS]{…}")
    return ToolCall.of(found[1], json.loads(found[2]))
