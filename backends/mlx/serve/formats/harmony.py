"""The format of gpt-oss. An answer consists of messages, each with a header that names its channel or its recipient.

The channel `analysis` is reasoning, the channel `final` is content, and a message to `functions.name` is a call if the
model may call this function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from . import json_calls
from .base import CALLS, REASONING, Parser, Section
from .hermes import Hermes
from .reader import CONTENT, CallReader, Part, Reading, overlap

HEADERS = ("<|start|>", "<|channel|>")
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TAGS = (*HEADERS, MESSAGE, *ENDS, "<|constrain|>")


class Harmony(Hermes):
    name = "harmony"
    trigger = None
    around_calls = ("", None, "")

    def markers(self) -> Sequence[str]:
        return TAGS

    def parser(self, functions: Mapping[str, Any], opening: str) -> Parser:
        # The prompt may end within a header, or within a message.
        return HarmonyParser(functions, opening[start:] if (start := opening.rfind("<|start|>")) >= 0 else "")

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        raise NotImplementedError  # HarmonyParser does it

    def call_template(self, name: str) -> tuple[str, str]:
        # <|call|>, a stop id, ends the answer.
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""


def _read_call(reader: CallReader, name: str) -> Reading[None]:
    """Read the body of a message to a function: its arguments."""
    yield from json_calls.read_arguments(reader, name)
    reader.end()


class HarmonyParser(Parser):
    """Reads messages: a header up to <|message|>, and a body up to the next header or one of ENDS.

    - `opened`: the end of the prompt, which may have begun a message.
    """

    def __init__(self, functions: Mapping[str, Any], opened: str = ""):
        self._functions = functions
        self._buffer, self._header, self._in_header = "", "", False
        self._call: CallReader | None = None  # of the message, if it has a recipient
        self.feed(opened)

    @property
    def kind(self) -> str:
        recipient, channel = self._address()
        return CALLS if recipient else REASONING if channel == "analysis" or self._in_header else CONTENT

    @property
    def holds_text(self) -> bool:
        return bool(self._buffer) or self._call is not None and self._call.holds_text

    def _address(self) -> tuple[str | None, str]:
        """The function to which the message goes, or None, and its channel."""
        recipient = re.search(r"to=(?:functions\.)?([\w.-]+)", self._header)
        channel = re.search(r"<\|channel\|>\s*(\w+)", self._header)
        is_call = recipient is not None and recipient[1] in self._functions
        return recipient[1] if is_call else None, channel[1] if channel else "final"

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while found := self._next_tag():
            position, tag = found
            self._on_text(parts, self._buffer[:position])
            self._buffer = self._buffer[position + len(tag) :]
            if self._call is not None and self._call.in_string:
                self._on_text(parts, tag)
            else:
                self._on_tag(parts, tag)
        held = max(overlap(self._buffer, tag) for tag in TAGS)
        ready = len(self._buffer) - held
        self._on_text(parts, self._buffer[:ready])
        self._buffer = self._buffer[ready:]
        return parts

    def end(self) -> list[Part]:
        parts: list[Part] = []
        self._on_text(parts, self._buffer)
        self._buffer = ""
        self._finish(parts)
        return parts

    def _next_tag(self) -> tuple[int, str] | None:
        found = [(position, tag) for tag in TAGS if (position := self._buffer.find(tag)) >= 0]
        return min(found) if found else None

    def _on_tag(self, parts: list[Part], tag: str) -> None:
        if tag == MESSAGE:
            recipient, _ = self._address()
            if self._in_header and recipient is not None:
                self._call = CallReader(self._functions, partial(_read_call, name=recipient))
            self._in_header = False
        elif tag in HEADERS:
            if not self._in_header:
                self._finish(parts)
                self._header, self._in_header = "", True
            self._header += tag
        elif tag in ENDS:
            self._finish(parts)
            self._header, self._in_header = "", False
        elif self._in_header:
            self._header += tag

    def _on_text(self, parts: list[Part], text: str) -> None:
        if not text:
            return
        if self._in_header:
            self._header += text
        elif self._call is not None:
            parts += self._call.feed(text)
        elif parts and parts[-1][0] == self.kind:
            parts[-1] = (self.kind, parts[-1][1] + text)
        else:
            parts.append((self.kind, text))

    def _finish(self, parts: list[Part]) -> None:
        """End the message."""
        if self._call is not None:
            parts += self._call.finish("")
            self._call = None
