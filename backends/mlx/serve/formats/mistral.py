"""The formats of Mistral: `[TOOL_CALLS]` with a JSON list, or since version 11 with `name[ARGS]{…}` for each call."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Sequence

from . import json_calls
from .base import CALLS, Section
from .hermes import Hermes
from .reader import NAME, CallReader, Reading

TAG = "[TOOL_CALLS]"
_ID = re.compile(r"\w*")


class Mistral(Hermes):
    name = "mistral"
    trigger = None
    around_calls = (TAG + "[", ", ", "]")

    def call_id(self, name: str, index: int) -> str:
        return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))

    def call_sections(self) -> Sequence[Section]:
        return (Section(TAG, "", CALLS),)

    def markers(self) -> Sequence[str]:
        return [*super().markers(), "[ARGS]", "[CALL_ID]"]

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        while following := (yield from reader.peek()):
            if (yield from reader.take(TAG)):
                continue
            if following in "[{":
                yield from json_calls.read_several(reader)
            else:
                yield from _read_named(reader)

    def call_template(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"


class MistralNamed(Mistral):
    """The form since version 11 of Mistral's tokenizer."""

    name = "mistral-named"
    around_calls = ("", "", "")

    def call_template(self, name: str) -> tuple[str, str]:
        return f"{TAG}{name}[ARGS]", ""


def _read_named(reader: CallReader) -> Reading[None]:
    name = yield from reader.take_while(NAME)
    if (yield from reader.take("[CALL_ID]")):
        yield from reader.take_while(_ID)
    yield from reader.take("[ARGS]")
    yield from json_calls.read_arguments(reader, name)
    reader.end()
