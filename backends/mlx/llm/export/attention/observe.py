"""Finds out what the layers of a decoder cache and how they attend, by running the decoder on a few tokens."""

from __future__ import annotations

import sys

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..packed import arbitrary_products
from .all_keys import AllKeys, use_all_keys
from .cache import LayerSpec, sparse_attention_error
from .cached import use_cached_attention
from .masks import AttentionSpan, MaskFunction, function_of_tensor, span_of
from .own import CachedStates

_LENGTH = 8  # the number of tokens in the run
STATE_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # layers that keep a state
STATELESS_KINDS = {"moe", "mlp"}  # layers that keep nothing
_INDEXED_KINDS = {"indexed_attention", "minimax_m3_sparse"}  # layers with an index that chooses keys
# Layers with attention → whether the attention has a window or blocks.
_ATTENTION_KINDS = {"full_attention": False, "sliding_attention": True, "chunked_attention": True}


def observe(
    model: PreTrainedModel,
    call,
    capacity: int,
    window: str | int = "auto",
    observer: type[ObservingCache] | None = None,
) -> Specs:
    """Return what each layer of `model` caches and how it attends, by index. None stands for a layer without a cache.

    `call(tokens, positions, cache)` runs the model, whose attention is replaced in place. `capacity` is the number of
    positions for which the masks are examined. `window` is "auto", or the window of every layer, where 0 stands for no
    window. `observer` is the class of the cache that observes, by default `ObservingCache`. Raises ValueError if a
    layer uses its cache in a way that `KVCache` does not support.
    """
    use_all_keys(model, capacity)
    check_layer_types(model)
    cache = (observer or ObservingCache)(model, capacity)
    use_cached_attention(model, cache)
    length = min(_LENGTH, capacity)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    try:
        # What is observed holds for any weights. Eager torch takes long to dequantize those of packed layers.
        with torch.no_grad(), arbitrary_products(model):
            call(tokens, torch.arange(length)[None], cache)
    except (
        AttributeError,
        AssertionError,
        IndexError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        TypeError,
    ) as error:
        raise ValueError(
            f"export_llm: model: {type(model).__name__}: {_innermost_module(model)} cannot run over the KV caches of a "
            f"program: {error!r}"
        ) from error
    cache.check()
    if not cache.states and not any(layer.keys for layer in cache.layers):
        name = type(model).__name__
        raise ValueError(f"export_llm: model: {name} has no attention over a KV cache, expected a decoder")
    config = model.config.get_text_config()
    return Specs([layer.spec(config, window) for layer in cache.layers], cache.states, cache.recurrences)


class Specs(list):
    """The `LayerSpec` of each layer, or None.

    `states` has the shapes and dtypes of the states, and `recurrences` the recurrences, as in `StateObserver`.
    """

    def __init__(self, layers: list[LayerSpec | None], states: dict, recurrences: dict):
        super().__init__(layers)
        self.states, self.recurrences = states, recurrences


def check_layer_types(model: PreTrainedModel) -> None:
    """Raise ValueError if the config has layers of an unknown kind."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    known = {*_ATTENTION_KINDS, *STATE_KINDS, *STATELESS_KINDS}
    if any(isinstance(module, AllKeys) for module in model.modules()):
        known |= _INDEXED_KINDS
    unknown = sorted(kinds - known)
    if unknown:
        raise ValueError(
            f"export_llm: model: {type(model).__name__}: got layers of kind {', '.join(unknown)}, expected attention"
        )


def span_by_config(config, index: int) -> AttentionSpan:
    """Return the span that the config gives for layer `index`. It is for a layer whose mask could not be observed."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds and index < len(kinds) else None
    blocks = kind == "chunked_attention"
    size = getattr(config, "attention_chunk_size" if blocks else "sliding_window", None)
    has_window = kind is None or _ATTENTION_KINDS.get(kind, kind == "hybrid_sliding")
    return AttentionSpan(size, blocks) if has_window else AttentionSpan()


class ObservingCache(Cache):
    """A cache that records what the layers of `model` do with it. It computes no attention: the results are zeros."""

    def __init__(self, model: PreTrainedModel, capacity: int):
        super().__init__(layers=[])
        self.names: dict[int, str] = {}
        for module in model.modules():
            index = getattr(module, "layer_idx", getattr(module, "layer_id", None))
            # The name contains "Attention" or "attention".
            if isinstance(index, int) and "ttention" in type(module).__name__:
                self.names.setdefault(index, f"{type(module).__name__} of layer {index}")
        self.capacity = capacity
        self._add_layers(max(self.names, default=-1))
        self.states: dict = {}
        self.recurrences: dict = {}

    def check(self) -> None:
        """Do nothing. A derived class raises ValueError if a layer did something that was not observed."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self._add_layers(layer_idx)
        return self.layers[layer_idx].update(key_states, value_states)

    def _add_layers(self, last: int) -> None:
        for index in range(len(self.layers), last + 1):
            self.layers.append(_ObservedLayer(self.names.get(index, f"layer {index}"), index, self.capacity))

    def update_indexer(self, states, layer_idx):
        raise sparse_attention_error()

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def has_previous_state(self, layer_idx=None, state_idx=None) -> bool:
        return False

    is_compileable = True

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.layers)


class _ObservedLayer:
    """Records the shapes, masks and biases of a layer. Its methods are those of a layer of `KVCache`."""

    is_initialized = False  # mllama asks whether the keys of an image are there
    supports_early_init = True  # `Cache.is_initialized`, which HRM reads, looks only at such layers

    def __init__(self, name: str, index: int, capacity: int):
        self.name, self.index, self.capacity = name, index, capacity
        self.keys: tuple[int, int] | None = None
        self.values: tuple[int, int] | None = None
        self.slopes: torch.Tensor | None = None
        self.has_sinks = self.is_meta = False
        self.spans: set[AttentionSpan] = set()
        self.is_latent = self.has_attended = False
        self.indexer_position_ids: torch.Tensor | None = None

    def update(self, key_states, value_states):
        self.keys, self.values = (tuple(states.shape[1::2]) for states in (key_states, value_states))  # (heads, size)
        self.is_meta = key_states.is_meta
        return CachedStates(key_states, self), CachedStates(value_states, self)

    def attend(
        self, query, scale, *, softcap=None, sinks=None, slopes=None, keys=None, values=None, value_size=None
    ) -> torch.Tensor:
        self.has_attended, self.is_latent, self.has_sinks = True, value_size is not None, sinks is not None
        size = value_size or (self.values[1] if values is None else values.shape[3])
        return query.new_zeros((*query.shape[:3], size))

    def add_mask(self, function: MaskFunction) -> None:
        span = span_of(function, self.capacity)
        if span is None and self.is_meta:  # without values, a mask tensor cannot be examined: `spec` uses the config
            return
        if span is None:
            raise ValueError(
                f"export_llm: model: {self.name}: got a mask other than causal, with or without a window or blocks of "
                "positions"
            )
        self.spans.add(span)

    def add_bias(self, bias: torch.Tensor) -> torch.Tensor | None:
        bias = bias.detach().float().reshape(-1, *bias.shape[-2:])
        length = bias.shape[2]
        allowed = torch.ones(bias.shape[1:], dtype=torch.bool).tril(length - bias.shape[1])
        if not bias.is_meta and len(bias) == 1 and bias[0][allowed].eq(0).all():
            self.add_mask(function_of_tensor(bias[None]))
            return None
        positions = torch.arange(length)
        slopes = (bias[:, -1, -1] - bias[:, -1, 0]) / max(1, length - 1)
        if bias.is_meta:  # without values, the bias can only be assumed to be linear
            self.slopes = slopes
            return slopes
        # The tolerance of 0.02 slopes allows for a bias that was rounded to half precision.
        linear = slopes[:, None, None] * positions + bias[:, :, :1]
        if not torch.where(allowed, linear - bias, 0).abs().le(0.02 * slopes[:, None, None].abs()).all():
            raise ValueError(
                f"export_llm: model: {self.name}: got a bias of the attention scores that is not linear in the "
                "position of the key"
            )
        self.slopes = slopes
        return slopes

    def spec(self, config, window: str | int) -> LayerSpec | None:
        """Return what was observed, or None if the layer has no cache.

        Raises ValueError if a layer of `KVCache` cannot do what was observed.
        """
        if self.keys is None:
            return None
        if not self.has_attended:
            raise ValueError(
                f"export_llm: model: {self.name} uses the keys of its cache in a way of its own, expected attention: a "
                "product with the queries, a softmax, and a product with the values"
            )
        spans = self.spans - {AttentionSpan()} or self.spans  # a plain causal mask adds nothing to another one
        if len(spans) > 1:
            raise ValueError(f"export_llm: model: {self.name}: got several masks over the same cache, expected one")
        keys, values = self.keys, self.values
        if self.is_latent:
            keys, values = (keys[0], keys[1] + values[1]), None
        if window != "auto":
            span = AttentionSpan(window or None)  # type: ignore[arg-type]
        else:
            span = next(iter(spans), None) or span_by_config(config, self.index)
        return LayerSpec(self.name, keys, values, span, self.slopes, self.has_sinks)


def _innermost_module(model: torch.nn.Module) -> str:
    """Return the class name of the innermost module in which the current exception was raised."""
    traceback = sys.exc_info()[2]
    found = model
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        found = owner if isinstance(owner, torch.nn.Module) else found
        traceback = traceback.tb_next
    return type(found).__name__
