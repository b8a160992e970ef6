"""The cache of a decoder whose layers keep a state: named buffers of fixed size in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, get_layer_types_and_kwargs

from .cache import KVCache, _Layer

CONV, RECURRENT = "conv", "recurrent"
STATE_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # layer types of transformers that have a state


def has_state(config) -> bool:
    """Whether a layer of the model keeps a state."""
    return not STATE_KINDS.isdisjoint(getattr(config, "layer_types", None) or ())


@dataclass
class LayerSpec:
    """What a layer keeps: the shapes and dtypes, without the batch, of its states, keys and values.

    `states` is by kind, `CONV` or `RECURRENT`, and number, because a layer may have several of a kind. `keys` has the
    heads and sizes of keys and values, or is None for a layer without attention.
    """

    states: dict[tuple[str, int], tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    keys: list[tuple[int, int]] | None = None


class LayerState:
    """One state of a layer: a buffer `[1, 1, rows, N]` of the module `owner`, a state of N elements for each row.

    `value` is the state of the rows of the current call, `[B, ...]`, or None if the call has not read it. At position
    0, it is zero. `write` writes it back.
    """

    def __init__(self, owner: torch.nn.Module, name: str, shape: torch.Size, dtype: torch.dtype, rows: int):
        self.owner, self.name, self.shape = owner, name, shape
        owner.register_buffer(name, torch.zeros(1, 1, rows, shape.numel(), dtype=dtype))
        self.value: torch.Tensor | None = None

    @property
    def buffer(self) -> torch.Tensor:
        return getattr(self.owner, self.name)

    def read(self, cache: StateCache) -> torch.Tensor:
        if self.value is None:
            states = torch.ops.mlx.read_state(self.buffer, cache.position, cache.row, cache.rows)
            self.value = states.reshape(-1, *self.shape)
        return self.value

    def write(self, cache: StateCache) -> None:
        update = self.value.reshape(1, 1, -1, self.shape.numel()).to(self.buffer.dtype)
        updated = torch.ops.mlx.cache_update(self.buffer, update, cache.origin, False, cache.row, cache.rows)
        self.buffer.copy_(updated)


class StateCache(KVCache):
    """The cache of a decoder with states, which may also have layers with keys and values.

    It has the methods with which the modules of `transformers` read and write states. A call continues from the states
    that the rows hold, and `end_call` writes the new ones. Every call advances the states by all of its tokens. A row
    can therefore only continue where it ended, or begin again at position 0.

    `recurred` has the layers whose recurrence in the current call was one of `recurrent/kernels.py`.
    """

    origin: torch.Tensor  # int64 zeros like `position`: a row of a state has one position
    recurred: set[int]
    current: tuple[int, torch.Tensor | None] | None  # the layer and the recurrent state that was read last

    @classmethod
    def register_on(cls, owner, model: PreTrainedModel, *, rows, capacity, chunk, dtype, window="auto") -> StateCache:
        """Register buffers of zeros on `owner`, and return a cache that consists of these buffers.

        The shapes are those that the modules of `model` pass to a cache.
        """
        config = model.config.get_text_config()
        specs = _specs(model)
        layers: list[_Layer | _NoKeys] = []
        states: dict[tuple[int, str, int], LayerState] = {}
        for index, (spec, layer_window) in enumerate(zip(specs, _windows(config, window), strict=True)):
            for (kind, number), (shape, state_dtype) in spec.states.items():
                name = f"{kind}_state_{index}_{number}"
                states[index, kind, number] = LayerState(owner, name, shape, state_dtype, rows)
            if spec.keys is None:
                layers.append(_NoKeys())
                continue
            if layer_window is not None and layer_window >= capacity:
                layer_window = None
            length = capacity if layer_window is None else min(capacity, layer_window + chunk - 1)
            names = (f"key_cache_{index}", f"value_cache_{index}")
            for name, (heads, size) in zip(names, spec.keys):
                owner.register_buffer(name, torch.zeros(1, heads, rows * length, size, dtype=dtype))
            layers.append(_BatchedLayer(owner, names, layer_window))
        cache = cls(layers=layers)
        cache.rows, cache.states = rows, states
        return cache

    def begin_call(self, position, row=None):
        super().begin_call(position, row)
        self.origin, self.recurred, self.current = torch.zeros_like(position), set(), None
        for state in self.states.values():
            state.value = None
        return self

    def end_call(self) -> None:
        """Write the new states of the call to the buffers."""
        for state in self.states.values():
            if state.value is not None:
                state.write(self)
                state.value = None

    @property
    def without_keys(self) -> set[int]:
        """The layers without attention."""
        return {index for index, layer in enumerate(self.layers) if isinstance(layer, _NoKeys)}

    @property
    def recurrent_layers(self) -> set[int]:
        return {layer for layer, kind, _ in self.states if kind == RECURRENT}

    @property
    def has_sliding_window(self) -> bool:
        return any(layer.window is not None for layer in self.layers)

    @property
    def bytes(self) -> int:
        return super().bytes + sum(state.buffer.nbytes for state in self.states.values())

    # The methods that modules of `transformers` call.

    def get_conv_state(self, layer_idx, state_idx=0):
        return self.states[layer_idx, CONV, state_idx].read(self)

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, **kwargs):
        """Return the state followed by `conv_states` `[B, D, S]`, and keep its last part as the new state."""
        state = self.states[layer_idx, CONV, state_idx]
        joined = torch.cat([state.read(self), conv_states.to(state.buffer.dtype)], -1)
        state.value = joined[..., -state.shape[-1] :]
        return joined.to(conv_states.dtype)

    def get_recurrent_state(self, layer_idx, state_idx=0):
        value = self.states[layer_idx, RECURRENT, state_idx].read(self)
        self.current = layer_idx, value
        return value

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):
        self.states[layer_idx, RECURRENT, state_idx].value = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx=None, state_idx=None):
        return True

    def is_recording_past(self, layer_idx):
        return False

    def get_seq_length(self, layer_idx=0):
        return 0


class _NoKeys(LinearAttentionCacheLayerMixin):
    """Stands for a layer without keys and values in a `StateCache`."""

    window = None

    def lazy_initialization(self, *args, **kwargs):
        pass

    def update_conv_state(self, *args, **kwargs):
        raise NotImplementedError

    update_recurrent_state = update_conv_state

    def buffers(self):
        return []


class _BatchedLayer(_Layer):
    """Keys and values `[B, G, S, D]` of a model that runs B tokens of B rows as a batch."""

    def update(self, key_states, value_states, *args, **kwargs):
        if key_states.shape[0] > 1:
            key_states, value_states = key_states.transpose(0, 2), value_states.transpose(0, 2)
        return super().update(key_states, value_states, *args, **kwargs)


def _windows(config, window: str | int) -> list[int | None]:
    kinds, arguments = get_layer_types_and_kwargs(config)
    if window != "auto":
        return [window or None] * len(kinds)
    return [kwargs.get("sliding_window") for kwargs in arguments]


class _Recorder(Cache):
    """A cache that records what the layers of a model pass to it."""

    def __init__(self, count: int):
        super().__init__(layers=[_NoKeys() for _ in range(count)])
        self.specs = [LayerSpec() for _ in range(count)]
        self.recurred: set[int] = set()
        self.current = None

    def get_conv_state(self, layer_idx, state_idx=0):
        return None

    def get_recurrent_state(self, layer_idx, state_idx=0):
        self.current = layer_idx, None
        return None

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, conv_kernel_size=None, **kwargs):
        shape = torch.Size([*conv_states.shape[1:-1], conv_kernel_size or conv_states.shape[-1]])
        self.specs[layer_idx].states[CONV, state_idx] = shape, conv_states.dtype
        return conv_states

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):
        shape = recurrent_states.shape[1:]
        self.specs[layer_idx].states[RECURRENT, state_idx] = shape, recurrent_states.dtype
        return recurrent_states

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.specs[layer_idx].keys = [states.shape[1::2] for states in (key_states, value_states)]
        return key_states, value_states

    def has_previous_state(self, layer_idx=None, state_idx=None):
        return False

    def is_recording_past(self, layer_idx):
        return False

    def get_seq_length(self, layer_idx=0):
        return 0

    def get_mask_sizes(self, query_length, layer_idx):
        return query_length, 0


def _specs(model: PreTrainedModel) -> list[LayerSpec]:
    """Return what each layer keeps, by running `model` on two tokens without computing anything."""
    from .recurrent import KERNELS, cache_argument, kernels_of

    recorder = _Recorder(model.config.get_text_config().num_hidden_layers)
    model.set_attn_implementation("eager")
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), kernels_of(model, recorder):
        model(
            input_ids=tokens, position_ids=torch.arange(2).unsqueeze(0), use_cache=True,
            **{cache_argument(model): recorder},
        )  # fmt: skip
    recurrent = {i for i, spec in enumerate(recorder.specs) if any(kind == RECURRENT for kind, _ in spec.states)}
    for layer in sorted(recurrent - recorder.recurred):
        raise ValueError(
            f"export_llm: model: {type(model).__name__}: layer {layer} has a recurrence of its own, expected one of "
            f"{', '.join(sorted(KERNELS))}"
        )
    return recorder.specs
