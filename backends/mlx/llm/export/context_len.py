"""The numbers of positions for which a model can be exported."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedModel

from .attention.all_keys import all_keys_limit

SMALL = 4096  # positions; the default is at least this number, or the limit of the model
_PART_OF_MEMORY = 0.5  # that all rows of all caches may take if they are full
_STEP = 1024
_UNLIMITED = 1 << 20  # positions, for a model whose config has no limit, such as one with linear biases


def default_context_len(model: PreTrainedModel, rows: int = 1, bytes_per_number: float = 4) -> int:
    """Return the capacity of the caches of an export that does not name one: the limit of the model.

    If all `rows` were full, the caches have to fit into half of the memory of this machine, as far as the config tells
    their size. A capacity of 4096 is always permitted. On Linux, a cache takes memory for the positions that are
    written; elsewhere for all.
    """
    config = model.config.get_text_config()
    limit = min(filter(None, (position_limit(config), all_keys_limit(model))))
    if limit <= SMALL:
        return limit
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = rows * bytes_per_number * _numbers_per_position(config)
    fitting = int(memory * _PART_OF_MEMORY / size) // _STEP * _STEP if size else SMALL
    return min(limit, max(fitting, SMALL))


def _numbers_per_position(config: Any) -> int:
    """Return the number of numbers that the caches of a row keep for a position, or 0 if the config does not tell."""
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    hidden_size = getattr(config, "hidden_size", None)
    if not all(isinstance(value, int) and value > 0 for value in (layers, heads, hidden_size)):
        return 0
    if latent := getattr(config, "kv_lora_rank", None):
        return layers * (latent + (getattr(config, "qk_rope_head_dim", None) or 0))
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or hidden_size // heads
    return layers * 2 * key_heads * size


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
