"""The formats of DeepSeek: the name of a function and JSON, with a tag before, between and after them."""

from __future__ import annotations

from collections.abc import Sequence

from . import json_calls
from .base import CALLS, Section
from .hermes import Hermes
from .reader import NAME, CallReader, Reading

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_START, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CODE, CODE_END = "```json", "```"


class DeepSeek(Hermes):
    """DeepSeek V3.1."""

    name = "deepseek"
    trigger = None
    around_calls = (START, "", END)

    def call_sections(self) -> Sequence[Section]:
        return (Section(START, END, CALLS),)

    def markers(self) -> Sequence[str]:
        return [*super().markers(), CALL_START, SEPARATOR, CALL_END]

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        while (yield from reader.take(CALL_START)):
            name = (yield from reader.take_until(SEPARATOR)).strip()
            if name == "function":  # the type of the call, in V3 and R1
                yield from reader.peek()
                name = yield from reader.take_while(NAME)
            in_code = yield from reader.take(CODE)
            yield from json_calls.read_arguments(reader, name)
            reader.end()
            if in_code:
                yield from reader.expect(CODE_END)
            if (yield from reader.peek()):  # an answer may end with the arguments
                yield from reader.expect(CALL_END)

    def call_template(self, name: str) -> tuple[str, str]:
        return CALL_START + name + SEPARATOR, CALL_END


class DeepSeekV3(DeepSeek):
    """DeepSeek V3 and R1, which write the type of the call before it, and a code block around the arguments."""

    name = "deepseek-v3"
    around_calls = (START, "\n", END)

    def call_template(self, name: str) -> tuple[str, str]:
        return f"{CALL_START}function{SEPARATOR}{name}\n{CODE}\n", f"\n{CODE_END}{CALL_END}"
