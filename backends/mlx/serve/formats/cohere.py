"""The format of Cohere since Command R7B: a JSON list of calls, and content, between tags."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .base import CALLS, Section
from .hermes import Hermes
from .reader import CONTENT

START_ACTION, END_ACTION = "<|START_ACTION|>", "<|END_ACTION|>"


class Cohere(Hermes):
    name = "cohere"
    trigger = None
    around_calls = (START_ACTION + "[", ", ", "]" + END_ACTION)
    content_sections = (
        Section("<|START_RESPONSE|>", "<|END_RESPONSE|>", CONTENT),
        Section("<|START_TEXT|>", "<|END_TEXT|>", CONTENT),
    )

    def call_sections(self) -> Sequence[Section]:
        return (Section(START_ACTION, END_ACTION, CALLS),)

    def call_template(self, name: str) -> tuple[str, str]:
        return f'{{"tool_name": {json.dumps(name)}, "parameters": ', "}"
