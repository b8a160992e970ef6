"""Grammars as texts in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MAX_CHARACTERS = 64 * 1024  # of a schema, a pattern, a grammar, or the texts of a choice
# JSON in one line. The clients' option `x-guidance` has no effect.
JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


class LarkGrammar:
    """A grammar that is put together from expressions, which may refer to grammars of their own.

    - `markers`: the names of special tokens, by id. In a literal, they stand for these tokens.

    Attributes: `start`, the expression of the whole text.
    """

    start = ""

    def __init__(self, markers: Mapping[int, str]):
        self._markers = markers
        self._rules: list[str] = []
        self._parts: list[tuple[str, dict[str, Any]]] = []

    # The parameter `field` of these methods is the field of the request that has the schema, pattern or grammar.

    def json(self, schema: Mapping[str, Any], field: str) -> str:
        """Return an expression for JSON that follows a schema."""
        return self._part(field, json_schema={**schema, "x-guidance": JSON_OPTIONS})

    def lark(self, grammar: str, field: str) -> str:
        """Return an expression for a text that follows a grammar with the rule `start`."""
        return self._part(field, lark_grammar=grammar)

    def regex(self, pattern: str, field: str) -> str:
        """Return an expression for a text that matches a pattern as a whole. Only ASCII characters match `\\w`."""
        from llguidance import regex_to_lark

        return self.lark(f"start: /{regex_to_lark(pattern, 'dws')}/", field)

    def literal(self, text: str) -> str:
        """Return an expression for a text."""
        elements = []
        while text:
            found = [(text.find(name), id, name) for id, name in self._markers.items() if name in text]
            position, id, name = min(found, default=(len(text), None, ""))
            if position:
                elements.append(json.dumps(text[:position], ensure_ascii=False).replace("\x7f", "\\u007f"))
            if id is not None:
                elements.append(f"<[{id}]>")
            text = text[position + len(name) :]
        return " ".join(elements) or '""'

    def rule(self, expression: str, *, name: str = "r") -> str:
        """Add a rule. Return its name, which begins with `name` and may have attributes, such as `r[lazy]`."""
        base, bracket, attributes = name.partition("[")
        unique = f"{base}{len(self._rules)}"
        self._rules.append(f"{unique}{bracket}{attributes}: {expression}")
        return unique

    def text(self) -> str:
        """Return the grammar as a text for `LLMatcher`."""
        return _joined([f"start: {self.start}", *self._rules], [part for _, part in self._parts])

    def texts_of_parts(self) -> Iterator[tuple[str, str]]:
        """Yield for each schema, pattern and grammar its field and its own grammar, for `LLMatcher`."""
        for field, part in self._parts:
            yield field, _joined([f"start: @{part['name']}"], [part])

    def _part(self, field: str, **grammar: Any) -> str:
        name = f"part{len(self._parts)}"
        self._parts.append((field, {"name": name, **grammar}))
        return "@" + name


def _joined(rules: Sequence[str], parts: Sequence[Mapping[str, Any]]) -> str:
    """Return a grammar of rules, in which `@name` stands for a part with this name."""
    # Without no_forcing, the mask would allow one token of several with which a fixed text can begin.
    lark = "\n".join(['%llguidance {"no_forcing": true}', *rules])
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}, *parts]})


def one_of(expressions: Iterable[str]) -> str:
    return "(" + " | ".join(expressions) + ")"


def from_client(grammar: str) -> str:
    """Return the grammar of a client in Lark: one with the rule `start` stays, one with `root ::=` is GBNF.

    Raises ValueError for a grammar that is neither.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(grammar):
        return grammar
    try:
        return gbnf_to_lark(_ESCAPE.sub(_character, grammar))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except Exception as error:  # the module raises its own class, and Exception itself
        if not isinstance(error, GbnfToLarkError) and type(error) is not Exception:
            raise
        raise ValueError(str(error)) from error


def _character(escape: re.Match) -> str:
    """Return an escape sequence of GBNF in a form that Lark reads in the same way."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    number = int(digits, 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{number:02x}" if number < 0x80 else chr(number)
