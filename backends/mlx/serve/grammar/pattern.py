"""Writes the patterns of JSON schemas as rules of a grammar.

xgrammar makes one automaton of a whole pattern, which may also admit other texts: with `^(ab+)?$`, it admits "b". If
a pattern has a quote or a backslash, xgrammar admits it without the escape that a JSON string needs. Its automaton of
a class admits bytes that are not UTF-8. A rule made of single characters and ranges has none of these defects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from .characters import Ranges, characters, difference

_TOKEN = re.compile(
    r"(?P<times>(?:[*+?]|\{\d+(?:,\d*)?\})\??)|\(\?:|\[(?:\\.|[^\]\\])*\]"
    r"|\\(?:u\{[^}]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|.)|.",
    re.DOTALL,
)
_NO_CHARACTER = ("(", "(?:", ")", "|", "^", "$")
_ESCAPED = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # the characters that JSON does not have as they are
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


def simplified(pattern: str) -> str:
    """Return a pattern with the letter x in place of each class and escape."""
    return _TOKEN.sub(lambda token: "x" if len(token[0]) > 1 and _is_character(token) else token[0], pattern)


def rule(pattern: str, in_json: bool = True) -> str:
    """Return the right side of a rule for the strings that match a pattern.

    Like xgrammar, it takes a pattern as one of the whole string. `in_json`: the strings are those of JSON, without the
    outer quotes.

    Raises ValueError for a class or an escape that is not supported, and for `^` and `$` at places where they are no
    ends of the string. Otherwise, the pattern is valid.
    """
    tokens = [token[0] for token in _TOKEN.finditer(pattern) if not token["times"]]
    _check_ends(tokens, "^", ("(", "(?:"))
    _check_ends(tokens[::-1], "$", (")",))
    parts = ["("]
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if token["times"]:
            parts[-1] += token["times"].rstrip("?") or "?"
        elif _is_character(token):
            parts.append(_alternatives(characters(text), in_json))
        elif text in (")", "|"):
            parts += ['""', text] if parts[-1] in ("(", "|") else [text]
        elif text in ("(", "(?:"):
            parts.append("(")
    return " ".join([*parts, '""' if parts[-1] in ("(", "|") else "", ")"])


def _check_ends(tokens: Sequence[str], sign: str, opening: Sequence[str]) -> None:
    """Raise ValueError if `sign` may come after a character. `opening`: the tokens with which a group begins.

    For `$`, the tokens are in the opposite order.
    """
    at_edge, outer = True, [True]  # whether no character precedes: at this place, and where the groups around it begin
    for token in tokens:
        if token == sign and not at_edge:
            raise ValueError(f"{sign} in the middle is not supported")
        if token in opening:
            outer.append(at_edge)
        elif token == "|":
            at_edge = outer[-1]
        elif token not in ("^", "$"):
            at_edge = False
            if token in ("(", "(?:", ")"):
                outer.pop()


def _is_character(token: re.Match) -> bool:
    """Return whether a token is a character, an escape or a class."""
    return not token["times"] and token[0] not in _NO_CHARACTER


def _alternatives(ranges: Ranges, in_json: bool) -> str:
    """Return the form of a character in a rule. In JSON, it has long escapes such as `\\u0000` only without others."""
    plain = difference(ranges, _ESCAPED) if in_json else ranges
    if plain == ranges:
        return _one_of(ranges)
    escapes = [json.dumps(chr(code))[2:-1] for low, high in difference(ranges, plain) for code in range(low, high + 1)]
    short = [escape for escape in escapes if len(escape) == 1]
    forms = [_one_of(plain)] if plain else []
    if short:
        forms.append(rf'"\\" {_one_of([(ord(letter), ord(letter)) for letter in short])}')
    forms = forms or [rf'"\\{escape}"' for escape in escapes]
    return f"({' | '.join(forms)})"


def _one_of(ranges: Sequence[tuple[int, int]]) -> str:
    """Return the form of a character in a rule, as a text or as two classes.

    Of a class with hundreds of repetitions, xgrammar makes as many copies, which make the compilation slow and let
    `TokenBudget` take much memory. Two classes have fewer copies.
    """
    (first, last), *others = ranges
    if first < last:
        others = [(first + 1, last), *others]
    if not others:
        return json.dumps(chr(first), ensure_ascii=False)
    return f"([{_escape(first)}] | [{''.join(f'{_escape(low)}-{_escape(high)}' for low, high in others)}])"


def _escape(code: int) -> str:
    return f"\\U{code:08x}"
