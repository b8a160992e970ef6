"""Token ids → text that can be shown as it comes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import torch

from .settings import SettingError


class TokenTable:
    """The bytes of every token: the tensors of `token_table`."""

    def __init__(self, data: torch.Tensor, ends: torch.Tensor):
        self._data, self._ends = data.numpy().tobytes(), ends.tolist()

    def __getitem__(self, token: int) -> bytes:
        return self._data[self._ends[token] : self._ends[token + 1]]

    def text(self, tokens: Iterable[int]) -> str:
        """U+FFFD stands for what is no UTF-8."""
        return b"".join(self[token] for token in tokens).decode(errors="replace")


class TextStream:
    """The text of tokens as they come, whole characters only, up to the first of the strings
    `stop`, of which no part is let out.

    `table` may be None, then there is no text. Raises SettingError for an empty stop string.
    """

    def __init__(self, table: TokenTable | None, stop: Sequence[str] = ()):
        if not all(isinstance(s, str) and s for s in stop):
            raise SettingError("stop", f" is {list(stop)!r}, expected strings that are not empty")
        if stop and table is None:
            raise SettingError("stop", ": the program has no token bytes, so there is no text to stop at")
        self._table, self._stop = table, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # may be the beginning of a stop string

    def feed(self, token: int) -> tuple[str, bool]:
        """What `token` lets out, and whether a stop string came."""
        if self._table is None:
            return "", False
        return self._release(self._decoder.decode(self._table[token]))

    def finish(self) -> tuple[str, bool]:
        """The same for what was held back until the end."""
        text, stopped = self._release(self._decoder.decode(b"", final=True))
        if not stopped:
            text, self._held = text + self._held, ""
        return text, stopped

    def _release(self, text: str) -> tuple[str, bool]:
        text = self._held + text
        found = [place for s in self._stop if (place := text.find(s)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
