"""The numbers of positions for which a model can be exported."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .attention.all_keys import all_keys_limit

DEFAULT_LIMIT = 4096  # positions; the default is not larger, because the whole KV cache is allocated at load
_UNLIMITED = 1 << 20  # positions, for a model whose config has no limit, such as one with linear biases


def default_context_len(model: PreTrainedModel) -> int:
    """Return the capacity of the caches of an export that does not name one."""
    limit = position_limit(model.config.get_text_config())
    return min(limit, DEFAULT_LIMIT, all_keys_limit(model) or limit)


def position_limit(config: Any) -> int:
    """Return the number of positions for which a model is made, including those that rotary scaling adds.

    Some configs have the scaled number in `max_position_embeddings`, others the number before scaling. The result is
    then the larger one of the two possible numbers.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 0
    limit = limit if limit > 0 else _UNLIMITED  # XLNet has -1
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor") or 1
    match rope.get("rope_type"):
        case "dynamic" | "linear":
            return int(limit * factor)
        case "yarn":
            return max(limit, int(rope.get("original_max_position_embeddings", limit) * factor))
    return limit
