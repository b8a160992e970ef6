"""Key-value caches that live in the program."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


def layer_windows(config, window: str | int = "auto") -> list[int | None]:
    """How many positions each layer sees, its own included; None is all of them.

    `auto` goes by the model's config; a number is the window of every layer, 0 is none.
    """
    count = config.num_hidden_layers
    if window != "auto":
        return [window or None] * count
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if size else "full_attention"] * count
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ValueError(f"export_llm: layers of kind {', '.join(unknown)}, expected attention")
    return [size if kind == "sliding_attention" else None for kind in kinds]


class KVCache(Cache):
    """The cache of a Hugging Face decoder, over buffers of fixed size.

    One pair of buffers `[batch, key heads, rows, head size]` for each layer, registered on
    `owner` so that export sees them as its mutable state. A layer that sees everything has a
    row for each of `capacity` positions; one with a window has a ring, with room for the
    window and for the `chunk` tokens of one call.

    `position` tells where the tokens of this call begin, int64 `[1]`; `first`, int64 `[batch]`
    or None, which position of each sequence is its own first, behind the padding.
    """

    position: torch.Tensor
    first: torch.Tensor | None
    attended: set[int]  # the layers that have read it in this call

    @classmethod
    def on(
        cls,
        owner: torch.nn.Module,
        config,
        *,
        batch: int,
        capacity: int,
        chunk: int,
        dtype: torch.dtype,
        window: str | int = "auto",
    ) -> KVCache:
        """Register zeroed buffers on `owner` and return the cache over them."""
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = []
        for index, seen in enumerate(layer_windows(config, window)):
            if seen is not None and seen >= capacity:
                seen = None
            rows = capacity if seen is None else min(capacity, seen + chunk - 1)
            names = (f"key_cache_{index}", f"value_cache_{index}")
            for name in names:
                owner.register_buffer(name, torch.zeros(batch, heads, rows, size, dtype=dtype))
            layers.append(_Layer(owner, names, seen))
        return cls(layers=layers)

    def at(self, position: torch.Tensor, first: torch.Tensor | None = None) -> KVCache:
        """This cache, with the tokens of the coming call at `position`."""
        self.position, self.first, self.attended = position, first, set()
        for layer in self.layers:
            layer.position = position
        return self

    @property
    def slides(self) -> bool:
        return any(layer.window is not None for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers())


class _Layer(CacheLayerMixin):
    is_compileable = True
    is_sliding = False

    def __init__(self, owner: torch.nn.Module, names: tuple[str, str], window: int | None):
        super().__init__()
        self.owner, self.names, self.window = owner, names, window
        self.position: torch.Tensor | None = None
        self.is_initialized = True

    def buffers(self) -> list[torch.Tensor]:
        return [getattr(self.owner, name) for name in self.names]

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new rows; returns the whole buffers."""
        updated = []
        for buffer, states in zip(self.buffers(), (key_states, value_states)):
            if states.shape[1::2] != buffer.shape[1::2]:
                (heads, size), (their_heads, their_size) = buffer.shape[1::2], states.shape[1::2]
                raise ValueError(
                    f"export_llm: {self.names[0]} has {heads} heads of {size} by the config, and the "
                    f"layer makes {their_heads} of {their_size}; expected the same for keys and values"
                )
            rows = torch.ops.mlx.cache_update(
                buffer, states.to(buffer.dtype), self.position, self.window is not None
            )
            buffer.copy_(rows)
            updated.append(rows)
        return tuple(updated)

    def get_mask_sizes(self, query_length):
        return self.get_max_length(), 0

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return self.buffers()[0].shape[2]
