"""KV caches that are buffers of the program."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


def layer_windows(config, window: str | int = "auto") -> list[int | None]:
    """Return the window of each layer: the number of last positions to which a query attends.

    The window includes the position of the query. It is None for a layer that attends to all positions.
    The argument `auto` follows the config of the model. A number is the window of every layer, and 0
    stands for None. Raises ValueError if the config has layers other than attention.
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
        raise ValueError(f"export_llm: model: got layers of kind {', '.join(unknown)}, expected attention")
    return [size if kind == "sliding_attention" else None for kind in kinds]


class KVCache(Cache):
    """The cache of a Hugging Face decoder, in buffers of fixed size.

    Each layer has two buffers `[1, key heads, rows * length, head size]`, one for keys and one for values. They are
    registered on the module `owner`, so that export treats them as mutable buffers. A row holds the cache of one
    sequence; position p of row r is at index `r * length + p`. The length is `capacity` positions. In a sliding-window
    layer, each row is a ring buffer, whose length is enough for the window and the `chunk` tokens of one call.

    `position` and `row` say where the tokens of the current call are, int64: `[1]` for the position of the first token
    and the row of all, or `[S]` for a position and a row for each token. `row` is None if there is one row.
    """

    rows: int
    position: torch.Tensor
    row: torch.Tensor | None
    attended: set[int]  # indices of the layers that attended over this cache in the current call

    @classmethod
    def register_on(
        cls,
        owner: torch.nn.Module,
        config,
        *,
        rows: int,
        capacity: int,
        chunk: int,
        dtype: torch.dtype,
        window: str | int = "auto",
    ) -> KVCache:
        """Register buffers of zeros on `owner`, and return a cache that consists of these buffers."""
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = []
        for index, layer_window in enumerate(layer_windows(config, window)):
            if layer_window is not None and layer_window >= capacity:
                layer_window = None
            length = capacity if layer_window is None else min(capacity, layer_window + chunk - 1)
            names = (f"key_cache_{index}", f"value_cache_{index}")
            for name in names:
                owner.register_buffer(name, torch.zeros(1, heads, rows * length, size, dtype=dtype))
            layers.append(_Layer(owner, names, layer_window))
        cache = cls(layers=layers)
        cache.rows = rows
        return cache

    def begin_call(self, position: torch.Tensor, row: torch.Tensor | None = None) -> KVCache:
        """Prepare this cache for a call whose tokens are at `position` and `row`, and return it."""
        self.position, self.row, self.attended = position, row, set()
        for layer in self.layers:
            layer.cache = self
        return self

    @property
    def without_keys(self) -> set[int]:
        """The layers that keep no keys and values."""
        return set()

    @property
    def has_sliding_window(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(layer.window is not None for layer in self.layers)

    @property
    def bytes(self) -> int:
        """The size of all buffers together, in bytes."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers())


class _Layer(CacheLayerMixin):
    is_compileable = True
    is_sliding = False

    def __init__(self, owner: torch.nn.Module, names: tuple[str, str], window: int | None):
        super().__init__()
        self.owner, self.names, self.window = owner, names, window
        self.cache: KVCache | None = None
        self.is_initialized = True

    def buffers(self) -> list[torch.Tensor]:
        return [getattr(self.owner, name) for name in self.names]

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new keys and values `[1, G, S, D]` to the buffers, and return the whole buffers."""
        results = []
        for buffer, states in zip(self.buffers(), (key_states, value_states)):
            if states.shape[1::2] != buffer.shape[1::2]:
                (expected_heads, expected_size), (heads, size) = buffer.shape[1::2], states.shape[1::2]
                raise ValueError(
                    f"export_llm: model: {self.names[0]}: got {heads} heads of {size} from the layer, expected "
                    f"{expected_heads} of {expected_size} by the config, for keys and values alike"
                )
            updated = torch.ops.mlx.cache_update(
                buffer, states.to(buffer.dtype), self.cache.position, self.window is not None, self.cache.row,
                self.cache.rows,
            )
            buffer.copy_(updated)
            results.append(updated)
        return tuple(results)

    def get_mask_sizes(self, query_length):
        return self.get_max_length(), 0

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return self.buffers()[0].shape[2]
