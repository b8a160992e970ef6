"""The formats of DeepSeek: the name of a function and JSON, with a tag before, between and after them."""

from __future__ import annotations

from collections.abc import Sequence

from . import json_calls
from .base import Section
from .reader import NAME, CallReader, Reading
from .tagged import Tagged

CODE, CODE_END = "```json", "```"


class DeepSeek(Tagged):
    """DeepSeek V3.1."""

    name = "deepseek"
    open, close = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    around_calls = (open, "", close)
    call_open, separator, call_close = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

    def markers(self) -> Sequence[str]:
        return [*super().markers(), self.call_open, self.separator, self.call_close]

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        while (yield from reader.take(self.call_open)):
            yield from self.read_call(reader, (yield from reader.take_until(self.separator)).strip())
            if (yield from reader.peek()):  # an answer may end with the arguments
                yield from reader.expect(self.call_close)

    def read_call(self, reader: CallReader, name: str) -> Reading[None]:
        """Read the arguments of a call. `name` is the text before the separator."""
        if name == "function":  # the type of the call, in V3 and R1
            yield from reader.peek()
            name = yield from reader.take_while(NAME)
        in_code = yield from reader.take(CODE)
        yield from json_calls.read_arguments(reader, name)
        reader.end()
        if in_code:
            yield from reader.expect(CODE_END)

    def call_template(self, name: str) -> tuple[str, str]:
        return self.call_open + name + self.separator, self.call_close


class DeepSeekV3(DeepSeek):
    """DeepSeek V3 and R1, which write the type of the call before it, and a code block around the arguments."""

    name = "deepseek-v3"
    around_calls = (DeepSeek.open, "\n", DeepSeek.close)

    def call_template(self, name: str) -> tuple[str, str]:
        begin, end = super().call_template("function")
        return f"{begin}{name}\n{CODE}\n", f"\n{CODE_END}{end}"
