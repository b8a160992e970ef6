"""The cache of a decoder whose layers keep a state: named buffers of fixed size in place of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.cache import KVCache
from ..attention.observe import STATE_KINDS, ObservingCache, Specs
from .kernels import KERNELS
from .rewind import LENGTH, Log, Recurrence, fit_columns

CONV, RECURRENT = "conv", "recurrent"  # the kinds of states


def has_state(config) -> bool:
    """Whether a layer of the model keeps a state."""
    return not STATE_KINDS.isdisjoint(getattr(config, "layer_types", None) or ())


def can_rewind(specs: Specs) -> bool:
    """Whether the states of all layers can be rewound with the same results as if later tokens had not been read.

    A recurrence must be one that can run again. Its state must be float32: the state of decoding would be rounded after
    every token otherwise.
    """
    recurrent = {key: dtype for key, (_, dtype) in specs.states.items() if key[1] == RECURRENT}
    return all(
        layer in specs.recurrences and number == 0 and dtype == torch.float32
        for (layer, _, number), dtype in recurrent.items()
    )


class LayerState:
    """One state of a layer: a buffer `[1, 1, rows, N]` of the module `owner`, with N elements for each row.

    `value` is the state of the rows of the current call, `[B, ...]`, or None if the call has not used it. `read` gets
    it from the buffer, with zeros for a row at position 0. `write` stores it in the buffer.
    """

    def __init__(self, owner: torch.nn.Module, name: str, shape: torch.Size, dtype: torch.dtype, rows: int):
        self.owner, self.name, self.shape = owner, name, shape
        owner.register_buffer(name, torch.zeros(1, 1, rows, shape.numel(), dtype=dtype))
        self.value: torch.Tensor | None = None
        self.joined: torch.Tensor | None = None  # of a convolution: the old state, followed by the inputs of the call

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

    After `register_logs`, a call can keep a log, from which `rewind` computes the states after its first tokens.
    """

    origin: torch.Tensor  # zeros with the shape of `position`: the buffer of a state has one position for each row
    recurred: set[int]
    current: tuple[int, torch.Tensor | None] | None  # the layer that read its recurrent state last, and this state
    head: int  # for a layer that runs a recurrence for one head after the other, the next head
    # Layer → the operands of the recurrence in the current call, and the state before it.
    calls: dict[int, tuple[tuple[torch.Tensor, ...], torch.Tensor]]

    @classmethod
    def register_on(cls, owner, specs: Specs, *, rows, capacity, chunk, dtype) -> StateCache:
        """Register buffers of zeros on `owner`, and return a cache that consists of these buffers."""
        cache = super().register_on(owner, specs, rows=rows, capacity=capacity, chunk=chunk, dtype=dtype)
        cache.states = {
            (layer, kind, number): LayerState(owner, f"{kind}_state_{layer}_{number}", shape, state_dtype, rows)
            for (layer, kind, number), (shape, state_dtype) in specs.states.items()
        }
        cache.recurrences, cache.logs = {}, {}
        return cache

    def register_logs(self, owner: torch.nn.Module, specs: Specs) -> None:
        """Register the buffers of the logs on `owner`. `can_rewind(specs)` must be true.

        `logs` maps the key of a state to its logs. A convolution has one log: its last inputs. A recurrence has two:
        the state before the call, and its operands for each token.
        """
        self.recurrences = specs.recurrences
        for (layer, kind, number), state in self.states.items():
            name = f"{kind}_log_{layer}_{number}"
            if kind == CONV:
                shapes = {name: (*state.shape[:-1], state.shape[-1] + LENGTH)}
            else:
                shapes = {f"{name}_before": state.shape, name: (LENGTH, self.recurrences[layer].width)}
            self.logs[layer, kind, number] = [
                Log(owner, n, torch.Size(shape), state.buffer.dtype, self.rows) for n, shape in shapes.items()
            ]

    def begin_call(self, length, position, row=None, picture=None):
        super().begin_call(length, position, row, picture)
        self.origin, self.recurred, self.current, self.calls = torch.zeros_like(position), set(), None, {}
        for state in self.states.values():
            state.value = state.joined = None
        return self

    def end_call(self, keep_log: bool = False) -> None:
        """Write the new states of the call to the buffers, and with `keep_log` also the logs of the call."""
        for key, logs in self.logs.items() if keep_log else ():
            layer, kind, _ = key
            state = self.states[key]
            if kind == CONV:
                logs[0].write(self, fit_columns(state.joined, state.shape[-1]))
            else:
                tensors, before = self.calls[layer]
                logs[0].write(self, before)
                logs[1].write(self, self.recurrences[layer].pack(tensors))
        for state in self.states.values():
            if state.value is not None:
                state.write(self)
                state.value = state.joined = None

    def rewind(self, kept: int) -> None:
        """Return to the states after the first `kept` tokens of the last call.

        That call was for the same row, kept a log, and had at most `LENGTH` tokens.
        """
        for key, logs in self.logs.items():
            layer, kind, _ = key
            state = self.states[key]
            if kind == CONV:
                state.value = logs[0].read(self).narrow(-1, kept, state.shape[-1])
            else:
                before, log = (part.read(self) for part in logs)
                state.value = self.recurrences[layer].replay(log, kept, before)
        self.end_call()

    def record(self, operator: Any, tensors: tuple[torch.Tensor, ...], state: torch.Tensor) -> None:
        """Record a call of a recurrence in the current layer: its operands, and the state before it."""
        self.calls[self.current[0]] = tensors, state

    @property
    def bytes(self) -> int:
        buffers = [owner.buffer for owner in (*self.states.values(), *sum(self.logs.values(), []))]
        return super().bytes + sum(buffer.nbytes for buffer in buffers)

    # The methods that modules of `transformers` call.

    def get_conv_state(self, layer_idx, state_idx=0):
        return None  # see get_recurrent_state

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, **kwargs):
        """Return the old state followed by `conv_states` `[B, D, S]`. The end of the result becomes the new state."""
        state = self.states[layer_idx, CONV, state_idx]
        joined = torch.cat([state.read(self), conv_states.to(state.buffer.dtype)], -1)
        state.value, state.joined = joined[..., -state.shape[-1] :], joined
        return joined.to(conv_states.dtype)

    def get_recurrent_state(self, layer_idx, state_idx=0):
        """Read the state from which the next recurrence continues, and return None.

        With a state, a module would take another branch for a single token than for several. That branch rounds
        differently, and some do not apply `time_step_limit`. It would run only where several rows are decoded, so that
        the tokens of a row would depend on the other rows.
        """
        self.current = layer_idx, self.states[layer_idx, RECURRENT, state_idx].read(self)
        return None

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
    dtype). States have numbers because a layer may have several of a kind. `recurrences` maps the index of a layer to
    its recurrence, if this can run again.
    """

    def __init__(self, model: PreTrainedModel, capacity: int):
        super().__init__(model, capacity)
        self.model = model
        self.recurred: set[int] = set()
        self.current: tuple[int, None] | None = None

    def record(self, operator, tensors, state):
        self.recurrences[self.current[0]] = Recurrence.of(operator, tensors)

    def get_conv_state(self, layer_idx, state_idx=0):
        return None

    def get_recurrent_state(self, layer_idx, state_idx=0):
        self.current = layer_idx, None
        return None

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, conv_kernel_size=None, **kwargs):
        shape = torch.Size([*conv_states.shape[1:-1], conv_kernel_size or conv_states.shape[-1]])
        self.states[layer_idx, CONV, state_idx] = shape, conv_states.dtype
        return torch.cat([conv_states.new_zeros(conv_states.shape[0], *shape), conv_states], -1)

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):
        self.states[layer_idx, RECURRENT, state_idx] = recurrent_states.shape[1:], recurrent_states.dtype
        return recurrent_states

    def is_recording_past(self, layer_idx):
        return False

    def check(self) -> None:
        unknown = sorted({layer for layer, kind, _ in self.states if kind == RECURRENT} - self.recurred)
        if unknown:
            raise ValueError(
                f"export_llm: model: {type(self.model).__name__}: layers {', '.join(map(str, unknown))} have a "
                f"recurrence of their own, expected one of {', '.join(sorted(KERNELS))}"
            )
