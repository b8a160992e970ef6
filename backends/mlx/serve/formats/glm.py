"""The format of GLM-4.5 and later: the name of a function, then its arguments as pairs of tags."""

from __future__ import annotations

from collections.abc import Sequence

from . import json_calls
from .base import Section
from .hermes import Hermes, tagged_value
from .reader import NAME, CallReader, Reading, json_text

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm(Hermes):
    """Forced calls are JSON as in the format hermes, so that their arguments can follow a schema."""

    name = "glm"
    trigger = None

    def markers(self) -> Sequence[str]:
        return [*super().markers(), KEY, KEY_END, VALUE, VALUE_END]

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        if (yield from reader.peek()) == "{":
            yield from json_calls.read(reader)
            return
        reader.begin((yield from reader.take_while(NAME)))
        before = "{"
        while (yield from reader.take(KEY)):
            key = (yield from reader.take_until(KEY_END)).strip()
            reader.write(f"{before}{json_text(key)}: ")
            before = ", "
            yield from reader.expect(VALUE)
            yield from tagged_value(reader, reader.is_text(key), VALUE_END)
        reader.write("" if before == ", " else "{")
        reader.end()
