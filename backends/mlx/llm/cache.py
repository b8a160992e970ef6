"""A key-value cache that lives in the program."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class StaticKVCache(Cache):
    """The cache of a Hugging Face decoder, over buffers of fixed capacity.

    One pair of buffers `[batch, key heads, capacity, head size]` for each layer, registered
    on `owner` so that export sees them as its mutable state. `position` tells where the
    tokens of this call begin, an int64 tensor of one element.
    """

    position: torch.Tensor

    @classmethod
    def on(cls, owner: torch.nn.Module, config, *, batch: int, capacity: int, dtype: torch.dtype):
        """Register zeroed buffers on `owner` and return the cache over them."""
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = []
        for index in range(config.num_hidden_layers):
            names = [f"key_cache_{index}", f"value_cache_{index}"]
            for name in names:
                owner.register_buffer(name, torch.zeros(batch, heads, capacity, size, dtype=dtype))
            layers.append(_Layer(owner, *names))
        return cls(layers=layers)

    def at(self, position: torch.Tensor) -> StaticKVCache:
        """This cache, with the tokens of the coming call at `position`."""
        self.position = position
        for layer in self.layers:
            layer.position = position
        return self


class _Layer(CacheLayerMixin):
    is_compileable = True
    is_sliding = False

    def __init__(self, owner: torch.nn.Module, keys: str, values: str):
        super().__init__()
        self.owner, self.names = owner, (keys, values)
        self.position: torch.Tensor | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new rows; returns the whole buffers."""
        updated = []
        for name, states in zip(self.names, (key_states, value_states)):
            buffer = getattr(self.owner, name)
            rows = torch.ops.mlx.kv_cache_update(buffer, states.to(buffer.dtype), self.position)
            buffer.copy_(rows)
            updated.append(rows)
        return tuple(updated)

    def get_mask_sizes(self, query_length):
        return self.get_max_length(), 0

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return getattr(self.owner, self.names[0]).shape[2]
