"""A small model with large KV caches, and the memory that a call adds.

The added memory shows whether the call copies a cache.
"""

from collections.abc import Callable

import mlx.core as mx
from transformers import LlamaConfig, LlamaForCausalLM


def two_layers(capacity: int) -> LlamaForCausalLM:
    """Return a model with four cache buffers. Each buffer has `capacity * 2 * 64` float32 numbers for each row."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=128,
        max_position_embeddings=capacity,
    )
    return LlamaForCausalLM(config).eval()


def memory_growth(call: Callable[[], object]) -> tuple[int, int]:
    """Return by how many bytes MLX's peak and final active memory exceed its active memory before the call."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    call()
    return mx.get_peak_memory() - before, mx.get_active_memory() - before
