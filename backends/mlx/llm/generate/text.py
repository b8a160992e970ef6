"""Decodes token ids to text that can be shown while it is generated."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import torch

from ..sampling_parameters import SettingError


class TokenTable:
    """The bytes of every token: `table[token]`. The constructor takes the tensors that `token_table` returns."""

    def __init__(self, data: torch.Tensor, offsets: torch.Tensor):
        self._data, self._offsets = data.numpy().tobytes(), offsets.tolist()

    def __getitem__(self, token: int) -> bytes:
        return self._data[self._offsets[token] : self._offsets[token + 1]]

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`. Invalid UTF-8 becomes U+FFFD."""
        return b"".join(self[token] for token in tokens).decode(errors="replace")


class TextStream:
    """Decodes tokens one by one, up to the first of the strings `stop`.

    The stream returns whole characters only, and holds back text that may be the beginning of a stop
    string. If `table` is None, all text is empty. Raises SettingError for an empty stop string, and for
    stop strings without a table.
    """

    def __init__(self, table: TokenTable | None, stop: Sequence[str] = ()):
        if not all(isinstance(s, str) and s for s in stop):
            raise SettingError("stop", f": got {list(stop)!r}, expected non-empty strings")
        if stop and table is None:
            raise SettingError("stop", ": the program has no token bytes, which stop strings need")
        self._table, self._stop = table, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, token: int) -> tuple[str, bool]:
        """Add `token`. Return the text that can be shown now, and whether a stop string occurred."""
        if self._table is None:
            return "", False
        return self._release(self._decoder.decode(self._table[token]))

    def finish(self) -> tuple[str, bool]:
        """End the stream. Return the text that was held back, and whether a stop string occurred in it."""
        text, found_stop = self._release(self._decoder.decode(b"", final=True))
        if not found_stop:
            text, self._held = text + self._held, ""
        return text, found_stop

    def _release(self, text: str) -> tuple[str, bool]:
        """Append `text` to the text that is held back. Return the part that can be shown, and hold back the rest.

        Also returns whether a stop string occurred. The returned text then ends before the stop string.
        """
        text = self._held + text
        found = [index for s in self._stop if (index := text.find(s)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which `text` ends."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
