"""Keeps special tokens that a user writes from becoming control tokens.

A tokenizer finds the names of special tokens anywhere in a text. In a chat, the text has the tokens that the template
writes, which are control tokens, and those that the user writes, which are not. So the names in the user's texts get a
character inside them, `CUT`, before the template joins the texts. The text of the chat is then encoded in pieces, which
end at these characters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

CUT = "\ufdd0"  # Unicode reserves this code point: it is never a character of a text


class SpecialText:
    """Finds the `names` of special tokens in texts."""

    def __init__(self, names: Iterable[str]):
        self._names = sorted({name for name in names if len(name) > 1}, key=len, reverse=True)
        self._pattern = self._compile(self._names)

    def cut(self, value: Any, keep: Collection[str] = ()) -> Any:
        """Return a JSON value in which special tokens are cut in all texts and names, but for those in `keep`."""
        kept = [name for name in self._names if name in keep]
        pattern = self._compile([name for name in self._names if name not in kept]) if kept else self._pattern
        return _map_texts(value, lambda text: pattern.sub(_cut, text.replace(CUT, "")))

    def _compile(self, names: list[str]) -> re.Pattern[str]:
        # Looking ahead also finds names that overlap. Without names, the pattern matches nothing.
        ends = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names)
        return re.compile(ends or r"(?!)")


def _cut(match: re.Match[str]) -> str:
    return match[0] + CUT


def _map_texts(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    return value
