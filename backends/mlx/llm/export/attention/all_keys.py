"""Indexed attention, which attends to the keys that an indexer chooses, where the indexer chooses all keys."""

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
    """Return the number of keys that `module` chooses if it is the indexer of a layer, else None.

    An indexer may choose blocks of keys in place of single keys, and then adds the keys that are in no complete block.
    """
    if isinstance(module, AllKeys):
        return module.limit
    if not type(module).__name__.endswith("Indexer") or not getattr(module, "index_kpool_always_select_tail", True):
        return None
    if hasattr(module, "topk_blocks"):
        return module.topk_blocks * module.block_size
    limit = getattr(module, "index_topk", None) or getattr(module, "token_budget", None)
    return limit and limit - limit % (getattr(module, "index_kpool", None) or getattr(module, "compress_ratio", 1))


def all_keys_limit(model: torch.nn.Module) -> int | None:
    """Return the longest context in which the indexers of `model` choose all keys, or None without indexers."""
    return min(filter(None, map(_limit, model.modules())), default=None)


def use_all_keys(model: torch.nn.Module, context_len: int) -> None:
    """Replace the indexers of `model`, in place. Raises ValueError if one of them would have to choose keys."""
    for module in list(model.modules()):
        limit = _limit(getattr(module, "indexer", None))
        if limit is None:
            continue
        if context_len > limit:
            raise ValueError(
                f"export_llm: max_context_len: got {context_len}, expected at most {limit}: in a longer context, "
                f"{type(model).__name__} attends to the keys that an index chooses, which is not supported"
            )
        module.indexer = AllKeys(limit)
    for module in model.modules():
        # Also a layer that uses the choice of an earlier layer makes a mask of the choice.
        if hasattr(module, "build_attention_mask_from_topk"):
            module.build_attention_mask_from_topk = lambda **options: None
