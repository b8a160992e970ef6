"""The format of Kimi K2: the id of a call, which has the name of the function, and JSON between tags."""

from __future__ import annotations

import re

from . import json_calls
from .deepseek import DeepSeek
from .reader import CallReader, Reading

_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class Kimi(DeepSeek):
    name = "kimi"
    open, close = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    around_calls = (open, "", close)
    call_open, separator, call_close = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

    def read_call(self, reader: CallReader, name: str) -> Reading[None]:
        found = _ID.fullmatch(name)
        yield from json_calls.read_arguments(reader, found and found[1])
        reader.end()

    def call_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def call_template(self, name: str) -> tuple[str, str]:
        return super().call_template(self.call_id(name, 0))
