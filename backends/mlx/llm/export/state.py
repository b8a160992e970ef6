"""The cache of a decoder whose layers keep a state: named buffers of fixed size in place of keys and values."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .cache import KVCache
from .observe import STATE_KINDS, ObservingCache, Specs
from .recurrent import KERNELS

CONV, RECURRENT = "conv", "recurrent"  # the kinds of states


def has_state(config) -> bool:
    """Whether a layer of the model keeps a state."""
    return not STATE_KINDS.isdisjoint(getattr(config, "layer_types", None) or ())


class LayerState:
    """One state of a layer: a buffer `[1, 1, rows, N]` of the module `owner`, with N elements for each row.

    `value` is the state of the rows of the current call, `[B, ...]`, or None if the call has not used it. `read` gets
    it from the buffer, with zeros for a row at position 0. `write` stores it in the buffer.
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
            states = torch.ops.mlx.read_layer_state(self.buffer, cache.position, cache.row, cache.rows)
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

    `recurred` has the indices of the layers that have run a recurrence of `recurrent/` in the current call.
    """

    origin: torch.Tensor  # zeros with the shape of `position`: the buffer of a state has one position for each row
    recurred: set[int]
    current: tuple[int, torch.Tensor | None] | None  # the layer that read its recurrent state last, and this state
    head: int  # for a layer that runs a recurrence for one head after the other, the next head

    @classmethod
    def register_on(cls, owner, specs: Specs, *, rows, capacity, chunk, dtype) -> StateCache:
        """Register buffers of zeros on `owner`, and return a cache that consists of these buffers."""
        cache = super().register_on(owner, specs, rows=rows, capacity=capacity, chunk=chunk, dtype=dtype)
        cache.states = {
            (layer, kind, number): LayerState(owner, f"{kind}_state_{layer}_{number}", shape, state_dtype, rows)
            for (layer, kind, number), (shape, state_dtype) in specs.states.items()
        }
        return cache

    def begin_call(self, length, position, row=None):
        super().begin_call(length, position, row)
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
    def bytes(self) -> int:
        return super().bytes + sum(state.buffer.nbytes for state in self.states.values())

    # The methods that modules of `transformers` call.

    def get_conv_state(self, layer_idx, state_idx=0):
        return self.states[layer_idx, CONV, state_idx].read(self)

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, **kwargs):
        """Return the old state followed by `conv_states` `[B, D, S]`. The end of the result becomes the new state."""
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


class StateObserver(ObservingCache):
    """A cache that also records the states of the layers.

    `states` maps (index of the layer, `CONV` or `RECURRENT`, number of the state) to (shape without the batch axis,
    dtype). States have numbers because a layer may have several of a kind.
    """

    def __init__(self, model: PreTrainedModel, capacity: int):
        super().__init__(model, capacity)
        self.model = model
        self.recurred: set[int] = set()
        self.current: tuple[int, None] | None = None

    def get_conv_state(self, layer_idx, state_idx=0):
        return None

    def get_recurrent_state(self, layer_idx, state_idx=0):
        self.current = layer_idx, None
        return None

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, conv_kernel_size=None, **kwargs):
        shape = torch.Size([*conv_states.shape[1:-1], conv_kernel_size or conv_states.shape[-1]])
        self.states[layer_idx, CONV, state_idx] = shape, conv_states.dtype
        return conv_states

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):
        self.states[layer_idx, RECURRENT, state_idx] = recurrent_states.shape[1:], recurrent_states.dtype
        return recurrent_states

    def is_recording_past(self, layer_idx):
        return False

    def check(self) -> None:
        unknown = sorted({layer for layer, kind, _ in self.states if kind == RECURRENT} - self.recurred)
        if unknown:
            raise ValueError(
                f"export_llm: model: {type(self.model).__name__}: layers {', '.join(map(str, unknown))} have a recurrence "
                f"of their own, expected one of {', '.join(sorted(KERNELS))}"
            )
