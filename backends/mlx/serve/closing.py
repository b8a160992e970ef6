"""Ends JSON before its budget of tokens is used up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

# The ranks of tokens. Tokens of a lower rank end JSON sooner. Stop ids have the rank 0.
QUOTE, BRACKET, COMMA, DIGIT = 1, 2, 3, 4
FORBIDDEN = 255  # the rank of tokens that are not in a mask; _rank() never returns it


class Closer:
    """Narrows masks to the tokens that end JSON soonest.

    These are tokens that end the answer, then quotes, closing brackets, commas and digits, in this order. If a mask has
    none of these, the longest token is the best, because it gets through a fixed text or a long string in the fewest
    steps. After an opening bracket, closing brackets come before quotes, because a quote would begin a new value.
    """

    def __init__(self, tokens: Sequence[bytes], stop_ids: Collection[int]):
        import numpy

        size = -(-len(tokens) // 32) * 32
        self._rank = numpy.full(size, FORBIDDEN, dtype=numpy.uint8)
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
        """Clear the bits of tokens with control characters in `mask`, int32 `[words]`, if other tokens are left.

        JSON strings have no such characters, but xgrammar admits them in strings with a length or pattern.
        """
        printable = mask & self._printable
        if printable.any():
            mask[:] = printable

    def narrow(self, mask: Any, last_token: int | None) -> None:
        """Keep only the tokens of `mask` with the lowest rank. `last_token` is the token before, or None."""
        import numpy

        rank = self._rank_after_open if last_token is not None and self._opens[last_token] else self._rank
        bits = numpy.unpackbits(mask.view(numpy.uint8), bitorder="little").astype(bool)
        ranks = numpy.where(bits, rank, FORBIDDEN)
        lowest = ranks.min()
        if lowest < FORBIDDEN:
            mask[:] = numpy.packbits(ranks == lowest, bitorder="little").view(numpy.int32)

    def tokens_to_end(self, matcher: Any, limit: int, last_token: int | None = None) -> int | None:
        """Return how many tokens end the answer if each is drawn from a narrowed mask, or None if more than `limit`.

        `matcher` accepts these tokens. Raises ValueError if its grammar admits no complete answer.
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
                raise ValueError("the grammar admits no complete answer")
            token = int(bits.argmax())
            matcher.accept_token(token)
        return None


def _rank(token: bytes) -> int:
    """Return the rank of a token that is no stop id."""
    if not token:
        return FORBIDDEN - 1
    if token[:1] == b'"' and not token.strip(b'}]"'):
        return QUOTE
    if not token.strip(b"}]"):
        return BRACKET
    if token == b",":
        return COMMA
    if token.isdigit() and len(token) == 1:
        return DIGIT
    return DIGIT + 1 + max(0, 200 - len(token))  # a longer token has a lower rank
