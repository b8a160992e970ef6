"""Writes the patterns of JSON schemas as rules of a grammar.

xgrammar makes one automaton of a whole pattern, which may also admit other texts: with `^(ab+)?$`, it admits "b". If
a pattern has a quote or a backslash, xgrammar admits it without the escape that a JSON string needs. A rule made of
single characters and classes has neither defect.
"""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(
    r"(?P<times>(?:[*+?]|\{\d+(?:,\d*)?\})\??)|\(\?:|\[(?:\\.|[^\]\\])*\]"
    r"|\\(?:u\{[^}]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|.)|.",
    re.DOTALL,
)
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\f": "\f", r"\v": "\v"}
_STAND_IN = re.compile(r'Regex\("\^@([0-9a-f]*)\$", json_string=true\)')


def count_repetitions(pattern: str) -> int:
    """Return the number of `*`, `+`, `?` and `{m,n}` in a pattern."""
    return sum(token["times"] is not None for token in _TOKEN.finditer(pattern))


def stand_in(pattern: str) -> str:
    """Return a pattern that stands for `pattern` in a schema until `with_rules` replaces it in the grammar."""
    return f"^@{pattern.encode().hex()}$"


def with_rules(grammar: str) -> str:
    """Return a grammar of xgrammar in which rules replace the stand-ins of patterns."""
    return _STAND_IN.sub(lambda match: rule(bytes.fromhex(match[1]).decode()), grammar)


def rule(pattern: str, in_json: bool = True) -> str:
    """Return the right side of a rule for the strings that match a valid pattern.

    Like xgrammar, it takes a pattern as one of the whole string, and ignores `^` and `$`. `in_json`: the strings are
    those of JSON, without the outer quotes.
    """
    parts = ["("]
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if token["times"]:
            parts[-1] += token["times"].rstrip("?") or "?"
        elif text in (")", "|"):
            parts += ['""', text] if parts[-1] in ("(", "|") else [text]
        elif text in ("(", "(?:"):
            parts.append("(")
        elif text not in ("^", "$"):
            parts.append(_atom(text, in_json))
    return " ".join([*parts, '""' if parts[-1] in ("(", "|") else "", ")"])


def _atom(text: str, in_json: bool) -> str:
    """Return the form of a character or a class in a rule. In JSON, a class has no quotes and no backslashes."""
    is_class = text == "." or len(text) > 1 and (text[0] == "[" or text[1].isalnum() and text not in _ESCAPES)
    if is_class:
        return f"Regex({json.dumps(text, ensure_ascii=False)}, json_string={json.dumps(in_json)})"
    character = _ESCAPES.get(text, text[-1])
    if in_json:
        character = json.dumps(character, ensure_ascii=False)[1:-1]
    return json.dumps(character, ensure_ascii=False)
