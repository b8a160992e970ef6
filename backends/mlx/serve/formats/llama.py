"""The formats of Llama 3 and 4: a JSON object with `name` and `parameters`, `<function=…>`, or calls in Python."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from . import python_calls
from .base import CALLS, Section, ToolCall
from .hermes import Hermes

PYTHON_TAG = "<|python_tag|>"


class Llama(Hermes):
    name = "llama3"
    trigger = None
    around_calls = ("", "; ", "")

    def call_sections(self) -> Sequence[Section]:
        return Section(PYTHON_TAG, "", CALLS), Section("<function=", "</function>", CALLS)

    def bare_calls(self, functions: Sequence[str]) -> Callable[[str], bool | None]:
        names = "|".join(map(re.escape, functions))
        # Long enough to see the first name. The rest of the answer is then held back until its end.
        python = re.compile(rf"\s*\[\s*(?:{names})\s*\(")
        longest = max(map(len, functions)) + 40

        def is_bare(text: str) -> bool | None:
            start = text.lstrip()
            if not start:
                return None
            if start[0] == "{":
                head = re.match(r'\{\s*"(?:type|name)"', start)
                return True if head else None if len(start) < longest else False
            if start[0] == "[":
                return True if python.match(text) else None if len(start) < longest else False
            return False

        return is_bare

    def read_calls(self, text: str) -> list[ToolCall]:
        text = text.strip()
        if found := re.match(r"([\w.-]+)>(.*)", text, re.DOTALL):  # after <function=
            return [ToolCall.of(found[1], json.loads(found[2]))]
        if not text.startswith("{"):
            return python_calls.read(text)
        calls, decoder, position = [], json.JSONDecoder(), 0
        while position < len(text):
            value, position = decoder.raw_decode(text, position)
            calls.append(ToolCall.from_json(value))
            position = re.compile(r"[\s;,]*").match(text, position).end()
        return calls

    def call_template(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "parameters": ', "}"
