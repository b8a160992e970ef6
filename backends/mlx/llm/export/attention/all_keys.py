"""Attention to the keys that an indexer or a layer chooses, in contexts in which it chooses all keys."""

from __future__ import annotations

from typing import Any

import torch


class AllKeys(torch.nn.Module):
    """Takes the place of an indexer that chooses all keys in contexts of at most `limit` positions."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def forward(self, *arguments: Any, **options: Any) -> str:
        """Return a value that is not None. A layer without an indexer expects the choice of an earlier layer."""
        return "all keys"


def _limit(module: torch.nn.Module) -> int | None:
    """Return the number of keys that `module` chooses, as the indexer of a layer or as a layer itself, or None.

    An indexer may choose blocks of keys in place of single keys, and then adds the keys that are in no complete block.
    """
    if isinstance(module, AllKeys):
        return module.limit
    if not type(module).__name__.endswith("Indexer") or not getattr(module, "index_kpool_always_select_tail", True):
        return getattr(module, "keep_window_size", None)
    if hasattr(module, "topk_blocks"):
        return module.topk_blocks * module.block_size
    limit = getattr(module, "index_topk", None) or getattr(module, "token_budget", None)
    return limit and limit - limit % (getattr(module, "index_kpool", None) or getattr(module, "compress_ratio", 1))


def all_keys_limit(model: torch.nn.Module) -> int | None:
    """Return the longest context in which `model` attends to all keys, or None if it never chooses keys."""
    return min(filter(None, map(_limit, model.modules())), default=None)


def use_all_keys(model: torch.nn.Module, context_len: int) -> None:
    """Replace the indexers of `model`, in place. Raises ValueError if the model would have to choose keys."""
    limit = all_keys_limit(model)
    if limit is not None and context_len > limit:
        raise ValueError(
            f"export_llm: max_context_len: got {context_len}, expected at most {limit}: in a longer context, "
            f"{type(model).__name__} attends to the keys that it chooses, which is not supported"
        )
    for module in list(model.modules()):
        if (limit := _limit(getattr(module, "indexer", None))) is not None:
            module.indexer = AllKeys(limit)
        # Also a layer that uses the choice of an earlier layer makes a mask of the choice.
        if hasattr(module, "build_attention_mask_from_topk"):
            module.build_attention_mask_from_topk = lambda **options: None
