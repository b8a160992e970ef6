"""The formats of Gemma: calls in Python within a code block, or `call:name{key:value}` between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import json_calls, python_calls
from .base import CALLS, AnswerFormat, Section
from .reader import NAME, CallReader, Reading, json_or_text, json_text

INSTRUCTIONS = """\
You can call functions. Their signatures are here, one JSON object per line:
{tools}

To call functions, answer with a code block of calls in the syntax of Python, with named arguments:
```tool_code
[name(argument="value")]
```"""


class Gemma(AnswerFormat):
    """Gemma 3, whose chat template has no tools."""

    name = "gemma"

    def call_sections(self) -> Sequence[Section]:
        return (
            Section("```tool_code", "```", CALLS),
            Section("```tool_call", "```", CALLS),
            Section("<start_function_call>", "<end_function_call>", CALLS),
            Section("<|tool_call>", "<tool_call|>", CALLS),
        )

    def markers(self) -> Sequence[str]:
        return [*super().markers(), *QUOTES]

    def read_calls(self, reader: CallReader, section: Section) -> Reading[None]:
        if (yield from reader.take("call:")):
            yield from _read_tagged(reader)
        elif (yield from reader.peek()) == "{":
            yield from json_calls.read(reader)
        else:
            yield from python_calls.read_several(reader)

    def call_template(self, name: str) -> tuple[str, str]:
        # A forced call is JSON, so that its arguments can follow a schema.
        return f'```tool_call\n{{"name": {json.dumps(name)}, "arguments": ', "}\n```"

    def instructions(self, functions: Sequence[Mapping[str, Any]]) -> str:
        return INSTRUCTIONS.format(tools="\n".join(json.dumps(dict(f), ensure_ascii=False) for f in functions))

    def write_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return f"```tool_code\n[{', '.join(map(_written, calls))}]\n```"


def _written(call: Mapping[str, Any]) -> str:
    arguments = call["arguments"]
    if not isinstance(arguments, Mapping):  # what the model wrote is no JSON object
        return f"{call['name']}({arguments})"
    return f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


class GemmaTags(Gemma):
    """FunctionGemma and Gemma 4, which have tokens for the tags."""

    name = "gemma-tags"


QUOTES = ("<escape>", '<|"|>')  # around strings, in FunctionGemma and in Gemma 4


# call:name{key:value,…}: JSON without quotes around keys, and with a tag as quote of strings --------------------------

_KEY = re.compile(r"[^:{}\[\],]*")
_WORD = re.compile(r"[^,}\]]*")


def _read_tagged(reader: CallReader) -> Reading[None]:
    """Read a call after `call:`."""
    reader.begin((yield from reader.take_while(NAME)))
    yield from _members(reader)
    reader.end()


def _members(reader: CallReader) -> Reading[None]:
    """Read an object, and write it without its closing brace."""
    yield from reader.expect("{")
    reader.write("{")
    before = ""
    while not (yield from reader.take("}")):
        reader.write(before)
        if not (yield from _string(reader)):
            reader.write(json_text(_not_empty((yield from reader.take_while(_KEY)))))
        yield from reader.expect(":")
        reader.write(": ")
        yield from _value(reader)
        before = ", "
        if not (yield from reader.take(",")):
            yield from reader.expect("}")
            break


def _items(reader: CallReader) -> Reading[None]:
    """Read an array after its bracket."""
    reader.write("[")
    before = ""
    while not (yield from reader.take("]")):
        reader.write(before)
        yield from _value(reader)
        before = ", "
        if not (yield from reader.take(",")):
            yield from reader.expect("]")
            break
    reader.write("]")


def _value(reader: CallReader) -> Reading[None]:
    if (yield from _string(reader)):
        return
    if (yield from reader.peek()) == "{":
        yield from _members(reader)
        reader.write("}")
    elif (yield from reader.take("[")):
        yield from _items(reader)
    else:
        reader.write(json_or_text(_not_empty((yield from reader.take_while(_WORD)))))
        reader.send()


def _string(reader: CallReader) -> Reading[bool]:
    """Read a string, if there is one. It goes out as it comes."""
    for quote in QUOTES:
        if (yield from reader.take(quote)):
            reader.write('"')
            yield from reader.send_string_until((quote,))
            reader.write('"')
            return True
    return False


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("got no text, expected a key or a value")
    return text.strip()
