"""Formats that differ from others by their tags: those of MiniMax, Seed, Granite and Phi."""

from __future__ import annotations

import json
from collections.abc import Sequence

from . import json_calls
from .base import CALLS, Section
from .hermes import Hermes, read_xml
from .reader import CallReader, Reading


class Tagged(Hermes):
    """Calls are in one section. Forced calls are JSON, so that their arguments can follow a schema."""

    trigger = None
    open = close = ""

    def call_sections(self) -> Sequence[Section]:
        return (Section(self.open, self.close, CALLS),)

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        """Read calls in JSON, a list of them or one behind the other."""
        while (yield from reader.peek()) in ("{", "["):
            yield from json_calls.read_several(reader)

    def call_template(self, name: str) -> tuple[str, str]:
        return f'{self.open}{{"name": {json.dumps(name)}, "arguments": ', "}" + self.close


class MiniMax(Tagged):
    """MiniMax M2: `<invoke name="f"><parameter name="key">value</parameter></invoke>`."""

    name = "minimax"
    open, close = "<minimax:tool_call>", "</minimax:tool_call>"

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        yield from super().read_calls(reader, section)
        while (yield from reader.take("<invoke name=")):
            yield from read_xml(reader, "<parameter name=", "</invoke>")


class MiniMaxJson(Tagged):
    """MiniMax M1: a call in JSON in each line."""

    name = "minimax-m1"
    open, close = "<tool_calls>", "</tool_calls>"


class Seed(Tagged):
    """Seed-OSS: the XML of Qwen3-Coder."""

    name = "seed"
    open, close = "<seed:tool_call>", "</seed:tool_call>"

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        yield from super().read_calls(reader, section)
        while (yield from reader.take("<function=")):
            yield from read_xml(reader)


class Granite(Tagged):
    """Granite 3: a JSON list of calls behind a tag, up to the end of the answer."""

    name = "granite"
    open = "<|tool_call|>"
    around_calls = (open + "[", ", ", "]")

    def call_template(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "arguments": ', "}"


class Phi(Granite):
    """Phi-4-mini: as Granite, also between two tags, or behind `functools`."""

    name = "phi"
    close = "<|/tool_call|>"
    around_calls = (Granite.open + "[", ", ", "]" + close)

    def call_sections(self) -> Sequence[Section]:
        return (*super().call_sections(), Section("functools", "", CALLS))
