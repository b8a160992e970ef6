"""`Context`: keeps track of the contents of a program's KV cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .program import LLMProgram
from .sampler import Sampler


@dataclass(frozen=True)
class Drawn:
    """A drawn token id, and the number of the ids before it that were in the KV cache already."""

    id: int
    reused: int


class Context:
    """The KV cache of `program`, which all answers share.

    The caller of `draw` passes all ids that precede the token to draw. The context finds the longest
    prefix of these ids that is in the cache, rewinds the cache to the end of that prefix, and writes the
    remaining ids to the cache. Several answers may therefore be generated in turns, also by several
    threads. The turns do not change the tokens, but the cache has to be rewritten whenever the answer
    changes.

    Code that writes to the cache directly must hold `lock`, and must first call `invalidate`.
    """

    def __init__(self, program: LLMProgram):
        self.program = program
        self.lock = threading.Lock()
        self._ids: list[int] = []
        self._length = 0  # the cache holds _ids[:_length]
        # One more than the highest position that was written. The cache can rewind at most `max_rewind` positions from
        # here.
        self._written = 0

    def draw(
        self,
        ids: list[int],
        sampler: Sampler,
        *,
        step: int,
        allowed: torch.Tensor | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Drawn | None:
        """Draw the token after `ids`. Return None if `cancelled()` is true before the last chunk.

        `step` counts the draws of the answer from 0, and `allowed` is the mask of the tokens that may be
        drawn, or None. The context keeps the list `ids` without a copy. The caller may append to the list
        and pass it again, but must not change it in any other way.
        """
        program = self.program
        with self.lock:
            reused = self._rewind(ids)
            self._ids, self._length = ids, reused
            for begin in range(reused, len(ids), program.chunk):
                if cancelled():
                    return None
                chunk = ids[begin : begin + program.chunk]
                tokens = torch.tensor([chunk], dtype=torch.int64).expand(program.batch, -1)
                end = begin + len(chunk)
                self._written = max(self._written, end)
                if end < len(ids):
                    sampler.feed(tokens, begin, None)
                else:
                    sequences = [ids] * program.batch
                    drawn = sampler.draw(
                        tokens, begin, None, step=step, sequences=sequences, allowed=allowed
                    )
                self._length = end  # not reached if the call fails, so that the chunk is fed again
        return Drawn(drawn[0], reused)

    def invalidate(self) -> None:
        """Forget the contents of the cache: the next draw starts at position 0."""
        # The caller may write to any position, up to the last one.
        self._ids, self._length, self._written = [], 0, self.program.max_context_len

    def _rewind(self, ids: list[int]) -> int:
        """Rewind to the end of the common prefix of the cache and `ids`, and return the length of the prefix.

        The last id is never part of this prefix, because a call must have at least one token.
        """
        kept = self._length if ids is self._ids else _common_prefix(self._ids[: self._length], ids)
        kept = min(kept, len(ids) - 1)
        if self._written - kept > self.program.max_rewind:
            kept = 0  # a ring buffer has overwritten some of the positions
        if kept == 0:
            self._written = 0
        return kept


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
