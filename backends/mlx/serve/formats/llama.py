"""The formats of Llama 3 and 4: a JSON object with `name` and `parameters`, `<function=…>`, or calls in Python."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence

from . import json_calls, python_calls
from .base import CALLS, Section
from .hermes import Hermes
from .reader import NAME, CallReader, Reading

PYTHON_TAG, FUNCTION_TAG = "<|python_tag|>", "<function="
_SEPARATORS = re.compile(r"[\s;,]*")


class Llama(Hermes):
    name = "llama3"
    trigger = None
    around_calls = ("", "; ", "")

    def call_sections(self) -> Sequence[Section]:
        return Section(PYTHON_TAG, "", CALLS), Section(FUNCTION_TAG, "</function>", CALLS)

    def bare_calls(self, functions: Collection[str]) -> Callable[[str], bool | None]:
        names = "|".join(map(re.escape, functions))
        python = re.compile(rf"\s*\[\s*(?:{names})\s*\(")
        # A text of this length that does not match is no call: the longest name and 40 other characters fit into it.
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

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        if section.open == FUNCTION_TAG:
            name = yield from reader.take_while(NAME)
            yield from reader.expect(">")
            yield from json_calls.read_arguments(reader, name)
            reader.end()
        elif (yield from reader.peek()) != "{":
            yield from python_calls.read_several(reader)
        else:
            while (yield from reader.peek()) == "{":
                yield from json_calls.read(reader, is_bare=not section.open)
                yield from reader.take_while(_SEPARATORS)

    def call_template(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "parameters": ', "}"
