"""Attention masks of `transformers` as functions of positions, and what they mean for a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MaskFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # positions of queries and keys → bool


@dataclass(frozen=True)
class Pattern:
    """To which positions a query attends: to all up to its own, or to some of them.

    - `window`: the number of last positions, including that of the query. None if there is no limit.
    - `blocks`: the positions belong to blocks of `window` positions, and a query attends to its own block only.
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
    """A mask that stands for a function of positions, in place of the mask tensor that `transformers` would make.

    A model passes it on to its attention, perhaps after a cast or a slice, which return the mask itself.
    """

    ndim = 0  # no model may take it for a tensor

    def __init__(self, function: MaskFunction):
        self.function = function

    def __getitem__(self, index) -> Mask:
        return self

    def to(self, *arguments, **options) -> Mask:
        return self

    bool = float = contiguous = expand = to


def mask_interface(*arguments, mask_function: Callable, q_offset: Any = 0, kv_offset: Any = 0, **options) -> Mask:
    """A mask function for the mask interface of `transformers`. The result is a `Mask`."""
    return Mask(lambda query, key: mask_function(0, 0, query, key))


def tensor_mask(mask: torch.Tensor, hides: bool = False) -> MaskFunction:
    """Return the function of a mask [..., Q, K] for positions from 0 on, which may be a view of a larger mask.

    The mask is bool, or contains numbers that are added to the scores. If `hides`, it is true where a query does not
    attend.
    """
    whole = mask if mask._base is None else mask._base
    whole = whole.reshape(whole.shape[-2:]) if whole.numel() == whole.shape[-2:].numel() else mask[0, 0]
    allowed = whole if whole.dtype == torch.bool else whole > torch.finfo(whole.dtype).min / 2
    return lambda query, key: allowed[query, key] != hides


def pattern_of(function: MaskFunction, capacity: int) -> Pattern | None:
    """Return the pattern of a mask over `capacity` positions, or None if the mask has another pattern.

    Compares the mask with the pattern for queries around the places where a pattern changes.
    """
    with torch.device("cpu"):  # also while a model runs on the device meta
        return _pattern_of(function, torch.arange(capacity))


def _pattern_of(function: MaskFunction, positions: torch.Tensor) -> Pattern | None:
    capacity = len(positions)
    try:
        size = int(function(positions[:, None], positions[:1]).reshape(-1).sum())  # queries that attend to position 0
        at = {0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, capacity // 2, capacity - 1}
        queries = torch.tensor(sorted(q for q in at if 0 <= q < capacity))[:, None]
        allowed = function(queries, positions[None]).broadcast_to(len(queries), capacity)
    except (IndexError, RuntimeError):  # a mask tensor with fewer positions, or without values
        return None
    limited = [Pattern(size), Pattern(size, blocks=True)] if size else []
    candidates = [Pattern()] if size == capacity else limited
    return next((p for p in candidates if p.allows(queries, positions[None]).equal(allowed)), None)
