r"""The characters that a character, an escape or a class of a pattern matches, such as `a`, `\d` and `[^a-z]`.

The dialects of patterns differ: in JavaScript, only ASCII characters match `\w`; in Python, all letters do. An answer
takes the characters that match in every dialect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

Ranges = tuple[tuple[int, int], ...]  # of code points, in ascending order

_END = 0x110000  # of the code points
_SURROGATES = 0xD800, 0xDFFF  # no characters
_ASCII_DIGITS = ((0x30, 0x39),)
_ASCII_WORDS = (*_ASCII_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_ASCII_SPACES = (0x09, 0x0D), (0x20, 0x20)
_OTHER_SPACES = (
    (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_NEWLINE = (0x0A, 0x0A)
_OTHER_NEWLINES = (0x0D, 0x0D), (0x2028, 0x2029)
_BACKSPACE = 0x08  # the meaning of \b in a class
_CONTROLS = {"0": 0x00, "t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_PART = re.compile(r"\\(?:u\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))|.", re.DOTALL)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the characters that are in none of `ranges`, which may overlap."""
    result, start = [], 0
    for low, high in sorted([*ranges, _SURROGATES, (_END, _END)]):
        if start < low:
            result.append((start, low - 1))
        start = max(start, high + 1)
    return tuple(result)


def difference(ranges: Ranges, others: Iterable[tuple[int, int]]) -> Ranges:
    """Return the characters of `ranges` that are not in `others`."""
    return complement([*complement(ranges), *others])


@dataclass(frozen=True)
class Characters:
    """`certain`: the characters that match in every dialect. `possible`: those that match in at least one."""

    certain: Ranges
    possible: Ranges

    def __or__(self, other: Characters) -> Characters:
        return Characters(self.certain + other.certain, self.possible + other.possible)

    def __invert__(self) -> Characters:
        return Characters(complement(self.possible), complement(self.certain))


_NONE = Characters((), ())


def characters(text: str) -> Ranges:
    """Return the characters that match a character, an escape or a class in every dialect.

    Raises ValueError for an escape that is not supported, an empty range, and if no character matches.
    """
    if text == ".":
        found = ~Characters((_NEWLINE,), (_NEWLINE, *_OTHER_NEWLINES))
    else:
        found = _class(text[1:-1]) if text[0] == "[" and len(text) > 1 else _set(_value(_PART.match(text)))
    if not (ranges := complement(complement(found.certain))):  # in order, without surrogates
        raise ValueError(f"no character matches {text[:40]!r}")
    return ranges


def _class(body: str) -> Characters:
    """Return the characters of a class, from its text between the brackets."""
    is_negated = body.startswith("^")
    parts = [*_PART.finditer(body, int(is_negated))]
    if not parts:
        raise ValueError("a class without characters is not supported")
    values = [_BACKSPACE if part[0] == r"\b" else _value(part) for part in parts]
    letters = {part[4] for part in parts}
    is_all = any({letter, letter.upper()} <= letters for letter in "dsw")  # as in [\s\S]
    found, index = ~_NONE if is_all else _NONE, 0
    while index < len(parts):
        low, *after = values[index : index + 3]
        if len(after) == 2 and parts[index + 1][0] == "-" and isinstance(low, int) and isinstance(after[1], int):
            if after[1] < low:
                raise ValueError(f"the range {parts[index][0]}-{parts[index + 2][0]} is empty")
            found |= _range(low, after[1])
            index += 3
        else:
            found |= _set(low)
            index += 1
    return ~found if is_negated else found


def _value(part: re.Match) -> int | Characters:
    """Return the code point of a character, or the characters of an escape such as `\\d`."""
    code, letter = part[1] or part[2] or part[3], part[4]
    if code:
        value = int(code, 16)
        if value >= _END or _SURROGATES[0] <= value <= _SURROGATES[1]:
            raise ValueError(f"{part[0]} is no character")
        return value
    if letter is None or not letter.isalnum():
        return ord(letter or part[0])
    if letter in _CONTROLS:
        return _CONTROLS[letter]
    if letter.lower() not in "dsw":
        raise ValueError(f"the escape {part[0]} is not supported")
    return _named(letter) if letter.islower() else ~_named(letter.lower())


@cache
def _named(letter: str) -> Characters:
    """Return the characters of `\\d`, `\\s` or `\\w`."""
    if letter == "s":
        return Characters(_ASCII_SPACES, _ASCII_SPACES + _OTHER_SPACES)
    if letter == "w":
        return Characters(_ASCII_WORDS, (*_ASCII_WORDS, (0x80, _END - 1)))
    decimals = tuple((code, code) for code in range(0x80, _END) if chr(code).isdecimal())
    return Characters(_ASCII_DIGITS, _ASCII_DIGITS + decimals)


def _set(value: int | Characters) -> Characters:
    return _range(value, value) if isinstance(value, int) else value


def _range(low: int, high: int) -> Characters:
    return Characters(((low, high),), ((low, high),))
