"""KV caches that are buffers of the program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers.cache_utils import Cache, CacheLayerMixin

from ....custom_ops.quantized_cache import EntryFormat
from .masks import AttentionSpan, MaskFunction
from .own import CachedStates


class PictureAttention(Enum):
    """How the tokens of a picture attend to each other, beside how they attend as text does.

    - `ALL_LAYERS`: in all layers, each to all, whatever the window of the layer.
    - `WINDOWS`: in the layers with a window, each to those that the window reaches, which has no end behind the token.
    """

    ALL_LAYERS = "all_layers"
    WINDOWS = "windows"


@dataclass(frozen=True)
class LayerSpec:
    """What a layer of a model keeps in its cache, and how it attends.

    - `name`: names the layer in errors.
    - `keys`, `values`: the number of heads and their size. `values` is None if the values are the first part of the
      keys, as in latent attention.
    - `span`: the positions to which a query attends.
    - `slopes`: [H], or None: `slope * (key position - query position)` is added to the scores of a query head.
    - `has_sinks`: whether the softmax has a score that belongs to no key.
    - `format`: how the cache is quantized, or None if it holds floats.
    - `dtype`: the dtype of these floats, or None for that of the model's computation.
    """

    name: str
    keys: tuple[int, int]
    values: tuple[int, int] | None
    span: AttentionSpan
    slopes: torch.Tensor | None = None
    has_sinks: bool = False
    format: EntryFormat | None = None
    dtype: torch.dtype | None = None

    @property
    def widths(self) -> list[int]:
        """The sizes of a key and of a value, in numbers. A value that is a part of the key is left out."""
        return [self.keys[1]] if self.values is None else [self.keys[1], self.values[1]]


class KVCache(Cache):
    """The cache of a Hugging Face decoder, in buffers of fixed size.

    Each layer has a buffer `[1, key heads, rows * row_length, head size]` for keys and, unless its values are a part of
    the keys, another one for values. A quantized layer has two other buffers: the entries and the scales that
    `mlx::quantize_entries` returns, where an entry is a key followed by its value. The buffers are registered on the
    module `owner`, so that export treats them as mutable buffers. A row holds the cache of one sequence; position p of
    row r is at index `r * row_length + p`. `row_length` is `capacity`. In a layer with a window, each row is a ring
    buffer: `row_length` is enough for the window and the `chunk` tokens of one call, and position p is at index
    `r * row_length + p % row_length`. A layer that attends over the cache of another layer has no buffers.

    `length` is the number of tokens of the current call. `position` and `row` say where these tokens are, int64: `[1]`
    for the position of the first token and the row of all tokens, or `[S]` for a position and a row of each token.
    `row` is None if there is one row.
    """

    rows: int
    length: int
    picture: PictureAttention | None = None
    position: torch.Tensor
    row: torch.Tensor | None
    attended: set[str]  # names of the layers that attended over this cache in the current call

    @classmethod
    def register_on(
        cls,
        owner: torch.nn.Module,
        specs: Sequence[LayerSpec | None],
        *,
        rows: int,
        capacity: int,
        chunk: int,
        dtype: torch.dtype,
    ) -> KVCache:
        """Register buffers of zeros on `owner`, and return a cache that consists of these buffers.

        A spec of None is for a layer without a cache.
        """
        layers = []
        for index, spec in enumerate(specs):
            if spec is None:
                layers.append(_NoCache())
                continue
            window = spec.span.window
            window = None if window is not None and window >= capacity else window
            row_length = capacity if window is None else min(capacity, window + chunk - 1)
            buffers = _buffer_shapes(spec, dtype)
            names = [f"{kind}_cache_{index}" for kind in buffers]
            for name, (heads, size, buffer_dtype) in zip(names, buffers.values()):
                owner.register_buffer(name, lazy_zeros((1, heads, rows * row_length, size), buffer_dtype))
            if spec.slopes is not None:
                owner.register_buffer(f"slopes_{index}", spec.slopes, persistent=False)
            kind = _Layer if spec.format is None else _QuantizedLayer
            layers.append(kind(owner, index, spec, names, window))
        cache = cls(layers=layers)
        cache.rows = rows
        return cache

    def begin_call(
        self,
        length: int,
        position: torch.Tensor,
        row: torch.Tensor | None = None,
        picture: PictureAttention | None = None,
    ) -> KVCache:
        """Prepare this cache for a call of `length` tokens at `position` and `row`, and return it.

        `picture` is how the tokens attend to each other if they are those of a picture, or None.
        """
        self.length, self.position, self.row, self.attended = length, position, row, set()
        self.picture = picture
        for layer in self.layers:
            layer.cache = self
        return self

    def get_seq_length(self, layer_idx: int | None = None):
        """Return 0. For a layer, return a tensor of positions instead.

        The layer adds the index of a token in the call to this tensor, to get the position of the token.
        """
        if layer_idx is None:
            return 0
        count = self.position.shape[0]
        return self.position if count == 1 else self.position - torch.arange(count)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def update_indexer(self, states, layer_idx):
        raise sparse_attention_error()

    @property
    def kv_layers(self) -> list[_Layer]:
        """The layers with a cache."""
        return [layer for layer in self.layers if isinstance(layer, _Layer)]

    @property
    def has_sliding_window(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(layer.window is not None for layer in self.kv_layers)

    @property
    def bytes(self) -> int:
        """The size of all buffers together, in bytes."""
        return sum(buffer.nbytes for layer in self.kv_layers for buffer in layer.buffers())

    @property
    def numbers_per_token(self) -> list[int]:
        """For each layer with a cache, the number of numbers that it keeps for a token."""
        return [layer.spec.keys[0] * sum(layer.spec.widths) for layer in self.kv_layers]


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take physical memory only when they are written.

    An export creates caches of full size, but only reads them. `torch.zeros` would write to all of their pages.
    """
    if torch.get_default_device().type != "cpu":  # such as meta
        return torch.zeros(shape, dtype=dtype)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)  # from calloc: new pages that nobody has written
    return torch.from_numpy(memory).view(dtype).reshape(shape)


def _buffer_shapes(spec: LayerSpec, dtype: torch.dtype) -> dict[str, tuple[int, int, torch.dtype]]:
    """Return the kind of each buffer of a layer → the number of heads, the size of the last axis, and the dtype."""
    if spec.format is not None:
        groups = sum(map(spec.format.groups, spec.widths))
        heads = spec.keys[0]
        return {"entry": (heads, spec.format.bytes(groups), torch.uint8), "scale": (heads, 2 * groups, dtype)}
    shapes = {"key": spec.keys} | ({} if spec.values is None else {"value": spec.values})
    return {kind: (*shape, spec.dtype or dtype) for kind, shape in shapes.items()}


class _NoCache(CacheLayerMixin):
    """Stands for a layer without a cache of its own."""

    is_compileable = True
    is_sliding = False
    is_initialized = True

    def __init__(self):
        self.keys = self.values = torch.empty(0)  # as in a layer that `transformers` initialized early

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        raise ValueError("export_llm: model: a layer updates a cache that it did not have in its first call")

    def get_mask_sizes(self, query_length):
        return query_length, 0

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return -1

    @property
    def indexer_position_ids(self) -> None:
        """The positions of earlier calls. An indexer that chooses all keys does not need them."""

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        pass


class _Layer(_NoCache):
    """A layer whose cache is the buffers `names` of `owner`. `window` is the size of its window, or None.

    From `_NoCache` it only inherits what `transformers` expects of every layer of a cache.
    """

    def __init__(self, owner: torch.nn.Module, index: int, spec: LayerSpec, names: Sequence[str], window: int | None):
        super().__init__()
        self.owner, self.index, self.spec, self.names, self.window = owner, index, spec, names, window
        self.name = spec.name
        self.cache: KVCache | None = None

    def buffers(self) -> list[torch.Tensor]:
        return [getattr(self.owner, name) for name in self.names]

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new keys and values `[1, G, S, D]` to the buffers, and return the whole buffers."""
        if self.spec.values is None:
            key_states, value_states = torch.cat([key_states, value_states], -1), None
        self.updated = [self._write(b, s) for b, s in zip(self.buffers(), (key_states, value_states))]
        keys, values = (updated.to(key_states.dtype) for updated in (self.updated[0], self.updated[-1]))
        return CachedStates(keys, self), CachedStates(values, self)

    def _write(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        if states.shape[0] > 1:  # a batch of tokens of several rows
            states = states.transpose(0, 2)
        updated = torch.ops.mlx.cache_update(
            buffer,
            states.to(buffer.dtype),
            self.cache.position,
            self.window is not None,
            self.cache.row,
            self.cache.rows,
        )
        buffer.copy_(updated)
        return updated

    def attend(
        self, query, scale, *, softcap=None, sinks=None, slopes=None, keys=None, values=None, value_size=None
    ) -> torch.Tensor:
        """Return the attention [1, H, S, E] of `query` [1, H, S, D] over the cache, which includes the current tokens.

        `keys` and `values` replace those of the cache. If `value_size` is given, the values are the first `value_size`
        elements of the keys.
        """
        self.cache.attended.add(self.name)
        keys = self.updated[0] if keys is None else keys
        values = self.updated[-1] if values is None else values
        values = values if value_size is None else values[..., :value_size]
        if self._is_picture:
            if sinks is not None or slopes is not None:
                raise ValueError(f"export_llm: model: {self.name} attends to pictures in another way than to text")
            return self._attend_picture(query, keys, values, scale, softcap)
        before, after = self._arguments(query, scale, softcap, sinks, slopes)
        try:
            return torch.ops.mlx.cached_attention(query, keys, values, *before, *after)
        except ValueError as error:
            if keys.shape[2] == self.buffers()[0].shape[2]:
                raise
            raise ValueError(
                f"export_llm: model: {self.name} attends to keys that it does not write to its cache, expected "
                "attention over the whole cache"
            ) from error

    @property
    def _is_picture(self) -> bool:
        """Whether the tokens of the call attend to each other in this layer."""
        picture = self.cache.picture
        return picture is PictureAttention.ALL_LAYERS or picture is not None and self.spec.span.window is not None

    def _attend_picture(self, query, keys, values, scale, softcap) -> torch.Tensor:
        """Return the attention of tokens that attend to each other, and to the tokens before them as text does."""
        rows, first, length = self.cache.rows, self.cache.position, self.cache.length
        row = torch.zeros(1, dtype=torch.int64) if self.cache.row is None else self.cache.row
        keys, values = (x.unflatten(2, (rows, -1)).index_select(2, row).squeeze(2) for x in (keys, values))
        last, capacity = first + length - 1, keys.shape[2]
        held = last - (last - torch.arange(capacity)) % capacity  # the position of each key, if it was written
        queries = query.shape[2]
        place = (self._query_position(queries) + torch.arange(queries))[:, None]
        in_window = torch.ones_like(held, dtype=torch.bool) if self.window is None else held > place - self.window
        allowed = (held >= 0) & (held <= last)
        if self.cache.picture is PictureAttention.WINDOWS:
            allowed &= in_window & ((held >= first) | (held <= place))
        else:
            allowed &= (held >= first) | (held <= place) & in_window
        groups = query.shape[1] // keys.shape[1]
        keys, values = (x.to(query.dtype).repeat_interleave(groups, 1) for x in (keys, values))
        scores = (query @ keys.mT).float() * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        weights = torch.where(allowed, scores, float("-inf")).softmax(-1)
        return weights.to(query.dtype) @ values

    def _arguments(self, query, scale, softcap, sinks, slopes) -> tuple[tuple, tuple]:
        """Return the arguments of the attention operator in two tuples.

        `mlx::quantized_attention` takes the format of the cache between the two.
        """
        before = self._query_position(query.shape[2]), scale
        blocks = self.spec.span.blocks and self.window is not None
        return before, (self.window, softcap, self.cache.row, self.cache.rows, blocks, sinks, slopes)

    def _query_position(self, length: int) -> torch.Tensor:
        """Return the position of the first of `length` queries, or the positions of all of them.

        There may be fewer queries than tokens, because a model may compute its last layers only for the last tokens.
        """
        position, tokens = self.cache.position, self.cache.length
        if statically_known_true(tokens == length):
            return position
        return position + (tokens - length)

    def add_mask(self, function: MaskFunction) -> None:
        """Ignore the mask: `spec.span` already says to which positions a query attends."""

    def add_bias(self, bias: torch.Tensor) -> torch.Tensor | None:
        """Return the slopes [H] of a bias that the layer adds to its scores, or None if the bias is a mask."""
        return None if self.spec.slopes is None else getattr(self.owner, f"slopes_{self.index}")

    def get_mask_sizes(self, query_length):
        return self.get_max_length(), 0

    def get_max_length(self):
        return self.buffers()[0].shape[2]


class _QuantizedLayer(_Layer):
    """A layer whose cache is quantized. An entry holds a key and its value, or only a key that contains the value."""

    def update(self, key_states, value_states, *args, **kwargs):
        states = [key_states, value_states]
        if self.spec.values is None:
            states = [torch.cat(states, -1)]
        format = self.spec.format
        dtype = getattr(self.owner, self.names[1]).dtype
        quantized = torch.ops.mlx.quantize_entries(states, format.group_size, format.bits, format.rotate, dtype)
        self.updated = [self._write(b, s) for b, s in zip(self.buffers(), quantized)]
        # Placeholders for the cached keys and values. If a module computes other keys or values from them, `attend`
        # raises ValueError.
        heads, length = self.spec.keys[0], self.updated[0].shape[2]
        sizes = self.spec.keys[1], (self.spec.values or self.spec.keys)[1]
        keys, values = (key_states.new_zeros(1).expand(1, heads, length, size) for size in sizes)
        return CachedStates(keys, self), CachedStates(values, self)

    def attend(
        self, query, scale, *, softcap=None, sinks=None, slopes=None, keys=None, values=None, value_size=None
    ) -> torch.Tensor:
        if keys is not None or values is not None:
            raise ValueError(
                f"export_llm: kv_bits: {self.name} changes the keys or values that it has cached, expected kv_bits None"
            )
        self.cache.attended.add(self.name)
        format, spec = self.spec.format, self.spec
        if self._is_picture:
            raise ValueError(
                "export_llm: kv_bits: expected None for a model in which the tokens of pictures attend to each other"
            )
        if spec.values is None:
            offset, size = 0, value_size or spec.keys[1]
        else:
            offset, size = format.groups(spec.keys[1]) * format.group_size, spec.values[1]
        before, after = self._arguments(query, scale, softcap, sinks, slopes)
        return torch.ops.mlx.quantized_attention(
            query, *self.updated, *before, offset, size, format.group_size, format.bits, format.rotate, *after
        )


def sparse_attention_error() -> ValueError:
    """Return the error for a layer that caches an index of its keys."""
    return ValueError(
        "export_llm: model: got sparse attention, which chooses keys with an index of its own, expected attention to "
        "all keys or to a window"
    )
