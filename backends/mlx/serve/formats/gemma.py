"""The formats of Gemma: calls in Python within a code block, or `call:name{key:value}` between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import python_calls
from .base import CALLS, AnswerFormat, Section, ToolCall

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
    trigger = "```tool_call"

    def call_sections(self) -> Sequence[Section]:
        return (
            Section("```tool_code", "```", CALLS),
            Section("```tool_call", "```", CALLS),
            Section("<start_function_call>", "<end_function_call>", CALLS),
            Section("<|tool_call>", "<tool_call|>", CALLS),
        )

    def markers(self) -> Sequence[str]:
        return [*super().markers(), *QUOTES]

    def read_calls(self, text: str) -> list[ToolCall]:
        text = text.strip()
        if text.startswith("call:"):
            return [_Reader(text).call()]
        if text.startswith("{"):
            return [ToolCall.from_json(json.loads(text))]
        return python_calls.read(text)

    def call_template(self, name: str) -> tuple[str, str]:
        # A forced call is JSON, so that its arguments can follow a schema.
        return f'```tool_call\n{{"name": {json.dumps(name)}, "arguments": ', "}\n```"

    def instructions(self, functions: Sequence[Mapping[str, Any]]) -> str:
        return INSTRUCTIONS.format(tools="\n".join(json.dumps(dict(f), ensure_ascii=False) for f in functions))

    def write_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        written = (
            f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in call['arguments'].items())})"
            for call in calls
        )
        return f"```tool_code\n[{', '.join(written)}]\n```"


class GemmaTags(Gemma):
    """FunctionGemma and Gemma 4, which have tokens for the tags."""

    name = "gemma-tags"


QUOTES = ("<escape>", '<|"|>')  # around strings, in FunctionGemma and in Gemma 4


class _Reader:
    """Reads `call:name{key:value,…}`: JSON without quotes around keys, and with a tag as quote of strings."""

    def __init__(self, text: str):
        self._text, self._position = text, 0

    def call(self) -> ToolCall:
        self._expect("call:")
        name = self._match(r"[\w.-]+")
        return ToolCall.of(name, self._object())

    def _object(self) -> dict[str, Any]:
        self._expect("{")
        result: dict[str, Any] = {}
        while not self._take("}"):
            key = self._quoted() if self._at_quote() else self._match(r"[^:{}\[\],]+").strip()
            self._expect(":")
            result[key] = self._value()
            if not self._take(","):
                self._expect("}")
                break
        return result

    def _array(self) -> list[Any]:
        self._expect("[")
        result: list[Any] = []
        while not self._take("]"):
            result.append(self._value())
            if not self._take(","):
                self._expect("]")
                break
        return result

    def _value(self) -> Any:
        self._match(r"\s*")
        if self._at_quote():
            return self._quoted()
        if self._text.startswith("{", self._position):
            return self._object()
        if self._text.startswith("[", self._position):
            return self._array()
        word = self._match(r"[^,}\]]+").strip()
        try:
            return json.loads(word)
        except ValueError:
            return word

    def _at_quote(self) -> bool:
        return self._text.startswith(QUOTES, self._position)

    def _quoted(self) -> str:
        quote = next(quote for quote in QUOTES if self._text.startswith(quote, self._position))
        end = self._text.find(quote, self._position + len(quote))
        if end < 0:
            raise ValueError("a string has no end")
        text = self._text[self._position + len(quote) : end]
        self._position = end + len(quote)
        return text

    def _match(self, pattern: str) -> str:
        found = re.compile(pattern).match(self._text, self._position)
        if not found:
            raise ValueError(f"got {self._text[self._position :][:20]!r}, expected {pattern}")
        self._position = found.end()
        return found[0]

    def _take(self, text: str) -> bool:
        self._match(r"\s*")
        if not self._text.startswith(text, self._position):
            return False
        self._position += len(text)
        return True

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise ValueError(f"got {self._text[self._position :][:20]!r}, expected {text!r}")
