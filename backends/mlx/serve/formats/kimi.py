"""The format of Kimi K2: the id of a call, which has the name of the function, and JSON between tags."""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import json_calls
from .base import CALLS, Section
from .hermes import Hermes
from .reader import CallReader, Reading

START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_START, SEPARATOR, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class Kimi(Hermes):
    name = "kimi"
    trigger = None
    around_calls = (START, "", END)

    def call_sections(self) -> Sequence[Section]:
        return (Section(START, END, CALLS),)

    def markers(self) -> Sequence[str]:
        return [*super().markers(), CALL_START, SEPARATOR, CALL_END]

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        while (yield from reader.take(CALL_START)):
            id = (yield from reader.take_until(SEPARATOR)).strip()
            found = _ID.fullmatch(id)
            yield from json_calls.read_arguments(reader, found and found[1])
            reader.end()
            if (yield from reader.peek()):  # an answer may end with the arguments
                yield from reader.expect(CALL_END)

    def call_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def call_template(self, name: str) -> tuple[str, str]:
        return f"{CALL_START}functions.{name}:0{SEPARATOR}", CALL_END
