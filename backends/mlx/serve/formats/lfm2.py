"""The format of LFM2: calls in the syntax of Python between two tags."""

from __future__ import annotations

import json
from collections.abc import Sequence

from . import json_calls, python_calls
from .base import CALLS, Section
from .hermes import Hermes
from .reader import CallReader, Reading

START, END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2(Hermes):
    """Forced calls are JSON, so that their arguments can follow a schema."""

    name = "lfm2"
    trigger = None

    def call_sections(self) -> Sequence[Section]:
        return (Section(START, END, CALLS),)

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        if (yield from reader.peek()) == "{":
            yield from json_calls.read(reader)
        else:
            yield from python_calls.read_several(reader)

    def call_template(self, name: str) -> tuple[str, str]:
        return f'{START}{{"name": {json.dumps(name)}, "arguments": ', "}" + END
