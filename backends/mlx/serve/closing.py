"""Ends JSON before its budget of tokens is used up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

QUOTE, BRACKET, COMMA, DIGIT = 1, 2, 3, 4  # ranks of tokens; stop ids have 0
LAST = 255  # of no token that a mask has


class Closer:
    """Narrows masks to the tokens that end JSON soonest: those that end the answer, then quotes, closing brackets, commas
    and digits. Of other tokens, the longest: they are part of a fixed text or of a long string. After an opening
    bracket, closing ones come before quotes, which would begin a new value.
    """

    def __init__(self, tokens: Sequence[bytes], stop_ids: Collection[int]):
        import numpy

        size = -(-len(tokens) // 32) * 32
        self._rank = numpy.full(size, LAST, dtype=numpy.uint8)
        self._opens = numpy.zeros(size, dtype=bool)
        has_control = numpy.zeros(size, dtype=bool)
        for id, token in enumerate(tokens):
            self._rank[id] = 0 if id in stop_ids else _rank(token)
            self._opens[id] = token.endswith((b"{", b"["))
            has_control[id] = any(byte < 0x20 for byte in token)
        self._rank_after_open = numpy.where(
            self._rank == BRACKET, QUOTE, numpy.where(self._rank == QUOTE, BRACKET, self._rank)
        )
        self._printable = numpy.packbits(~has_control, bitorder="little").view(numpy.int32)

    def remove_control(self, mask: Any) -> None:
        """Clear the bits of tokens with control characters in `mask`, int32 `[words]`, if others are left: JSON has no
        such characters, and xgrammar admits them in strings with a length or pattern."""
        printable = mask & self._printable
        if printable.any():
            mask[:] = printable

    def narrow(self, mask: Any, last_token: int | None) -> None:
        """Clear the bits of all tokens in `mask` but those of the lowest rank that it has, after `last_token`."""
        import numpy

        rank = self._rank_after_open if last_token is not None and self._opens[last_token] else self._rank
        bits = numpy.unpackbits(mask.view(numpy.uint8), bitorder="little").astype(bool)
        ranks = numpy.where(bits, rank, LAST)
        lowest = ranks.min()
        if lowest < LAST:
            mask[:] = numpy.packbits(ranks == lowest, bitorder="little").view(numpy.int32)

    def shortest(self, matcher: Any, limit: int, last_token: int | None = None) -> int | None:
        """Return the number of tokens that a short end of an answer takes by `matcher`, or None if more than `limit`.

        Raises ValueError if there is no answer.
        """
        import numpy

        mask = numpy.empty((1, len(self._rank) // 32), dtype=numpy.int32)
        token = last_token
        for count in range(limit + 1):
            if matcher.is_terminated():
                return count
            matcher.fill_next_token_bitmask(mask)
            self.narrow(mask[0], token)
            bits = numpy.unpackbits(mask[0].view(numpy.uint8), bitorder="little")
            if not bits.any():
                raise ValueError("no answer follows it")
            token = int(bits.argmax())
            matcher.accept_token(token)
        return None


def _rank(token: bytes) -> int:
    """The rank of a token that is no stop id."""
    if not token:
        return LAST - 1
    if token[:1] == b'"' and not token.strip(b'}]"'):
        return QUOTE
    if not token.strip(b"}]"):
        return BRACKET
    if token == b",":
        return COMMA
    if token.isdigit() and len(token) == 1:
        return DIGIT
    return DIGIT + 1 + max(0, 200 - len(token))
