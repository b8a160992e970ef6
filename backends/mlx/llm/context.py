"""What the KV cache of a program holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .program import LLMProgram
from .sampler import Sampler


@dataclass(frozen=True)
class Drawn:
    """A token, and how many of the ids before it the cache held already."""

    id: int
    reused: int


class Context:
    """The one KV cache of `program`, shared by every answer.

    Whoever draws says which ids come before; the cache keeps those that it shares with them,
    rewinds, and takes in the rest. So answers may take turns, from several threads too: it
    costs them time and nothing else.
    """

    def __init__(self, program: LLMProgram):
        self.program = program
        self.lock = threading.Lock()
        self._ids: list[int] = []
        self._length = 0  # the cache holds _ids[:_length]
        self._reach = 0  # and was written up to here: a ring has lost what is too far behind

    def draw(
        self,
        ids: list[int],
        sampler: Sampler,
        *,
        step: int,
        allowed: torch.Tensor | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Drawn | None:
        """The token after `ids`; None if cancelled before it was drawn.

        From one call to the next `ids` may be the same list with more at its end; it must not
        change otherwise.
        """
        program = self.program
        with self.lock:
            kept = self._kept(ids)
            self._ids, self._length = ids, kept  # what a failing call leaves behind is not counted
            for first in range(kept, len(ids), program.max_seq_len):
                if cancelled():
                    return None
                piece = ids[first : first + program.max_seq_len]
                tokens = torch.tensor([piece], dtype=torch.int64).expand(program.batch, -1)
                end = first + len(piece)
                self._reach = max(self._reach, end)
                if end < len(ids):
                    sampler.feed(tokens, first, None)
                else:
                    rows = [ids] * program.batch
                    drawn = sampler.draw(
                        tokens, first, None, step=step, rows=rows, allowed=allowed
                    )
                self._length = end
        return Drawn(drawn[0], kept)

    def forget(self) -> None:
        """The next answer starts anew: somebody else wrote to the cache."""
        self._ids, self._length, self._reach = [], 0, self.program.context_len

    def _kept(self, ids: list[int]) -> int:
        """How many of `ids` need not be fed again; the last one always is."""
        kept = self._length if ids is self._ids else _common(self._ids[: self._length], ids)
        kept = min(kept, len(ids) - 1)
        if self._reach - kept > self.program.max_rewind:
            kept = 0
        if kept == 0:
            self._reach = 0
        return kept


def _common(a: list[int], b: list[int]) -> int:
    """The length of what both begin with."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
