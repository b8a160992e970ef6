"""Attention masks of `transformers` as functions of positions, and the spans of positions that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MaskFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # positions of queries and keys → bool


@dataclass(frozen=True)
class AttentionSpan:
    """The positions to which a query attends. None of them is after the position of the query.

    - `window`: None if the query attends to all positions up to its own. Otherwise a number of positions: the query
      attends to the last `window` positions up to its own, which is one of them.
    - `blocks`: if True, `window` is the size of blocks instead. The sequence is divided into blocks of this size, and
      the query attends to the positions of its own block up to its own.
    """

    window: int | None = None
    blocks: bool = False

    def allows(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether the query at position `query` attends to position `key`. The arguments broadcast."""
        allowed = key <= query
        if self.window is None:
            return allowed
        first = query - query % self.window if self.blocks else query - self.window + 1
        return allowed & (key >= first)


class Mask:
    """A mask given by a function of positions. It takes the place of the mask tensor that `transformers` would make.

    A model passes the mask to its attention. Casts and slices on the way return the mask itself. `shape` is that of the
    tensor, because some models compare it with the shape of the scores.
    """

    dtype = torch.bool
    ndim = 0  # models change mask tensors of rank 2 or 4, and leave this mask alone

    def __init__(self, function: MaskFunction, shape: tuple = ()):
        self.function, self.shape = function, shape

    def size(self) -> tuple:
        return self.shape

    def __getitem__(self, index) -> Mask:
        return self

    def __and__(self, choice: str) -> Mask:
        return self  # the indexer of a layer chose all keys

    def to(self, *arguments, **options) -> Mask:
        return self

    bool = float = contiguous = expand = to


def mask_interface(
    batch_size: int, q_length: int, kv_length: int, *arguments, mask_function: Callable, **options
) -> Mask:
    """Return a `Mask`. `transformers` calls this function in place of one that makes a mask tensor."""
    return Mask(lambda query, key: mask_function(0, 0, query, key), (batch_size, 1, q_length, kv_length))


def function_of_tensor(mask: torch.Tensor, hides: bool = False) -> MaskFunction:
    """Return the mask function of a mask tensor [..., Q, K], whose positions begin at 0.

    A bool mask is true where a query attends. If `hides` is set, it is true where the query does not attend. Any other
    mask holds numbers that are added to the scores. If the tensor is a view, the function reads the whole tensor behind
    the view, which may have more positions.
    """
    whole = mask if mask._base is None else mask._base
    whole = whole.reshape(whole.shape[-2:]) if whole.numel() == whole.shape[-2:].numel() else mask[0, 0]
    allowed = whole if whole.dtype == torch.bool else whole > torch.finfo(whole.dtype).min / 2
    return lambda query, key: allowed[query, key] != hides


def span_of(function: MaskFunction, capacity: int) -> AttentionSpan | None:
    """Return the `AttentionSpan` that a mask over `capacity` positions stands for, or None if there is none.

    Compares mask and span only for some queries: those around the ends of the first two windows or blocks, one in the
    middle, and the last one.
    """
    with torch.device("cpu"):  # also while a model runs on the device meta
        return _span_of(function, torch.arange(capacity))


def _span_of(function: MaskFunction, positions: torch.Tensor) -> AttentionSpan | None:
    capacity = len(positions)
    try:
        size = int(function(positions[:, None], positions[:1]).reshape(-1).sum())  # queries that attend to position 0
        at = {0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, capacity // 2, capacity - 1}
        queries = torch.tensor(sorted(q for q in at if 0 <= q < capacity))[:, None]
        allowed = function(queries, positions[None]).broadcast_to(len(queries), capacity)
    except (IndexError, RuntimeError):  # a mask tensor with fewer positions, or without values
        return None
    limited = [AttentionSpan(size), AttentionSpan(size, blocks=True)] if size else []
    candidates = [AttentionSpan()] if size == capacity else limited
    return next((p for p in candidates if p.allows(queries, positions[None]).equal(allowed)), None)
