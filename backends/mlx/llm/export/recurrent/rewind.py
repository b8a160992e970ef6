"""Logs from which the states of a row are rewound after a call of `verify` with wrong draft tokens.

A state cannot forget a token. A call of `verify` therefore stores, besides the new states, the states before the call
and the inputs of the recurrences for each token. If only the first tokens are kept, the recurrences run again for these
tokens. This needs no weights of the model, and is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....custom_kernel_ops.recurrence import (
    MIN_TOKENS_FOR_BLOCKS,
    RULES,
    diagonal_recurrence,
    gated_delta_rule,
    gated_linear_attention,
)

# The largest number of tokens of a call that can be rewound. Recurrences process so few tokens one by one, with the
# same rounding as in decoding.
LENGTH = MIN_TOKENS_FOR_BLOCKS - 1

# The operators that can run again. The value is the number of operands that only change the outputs, not the state.
_REPLAYABLE = {gated_delta_rule: 1, gated_linear_attention: 1, diagonal_recurrence: 0}


@dataclass(frozen=True)
class Recurrence:
    """The recurrence of a layer.

    - `operator`: an operator of `custom_kernel_ops/recurrence.py`.
    - `axis`: the axis of the tokens in its operands.
    - `shapes`: the shapes of the operands that change the state, without the axes of batch and tokens.
    """

    operator: Any
    axis: int
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, operator: Any, tensors: tuple[torch.Tensor, ...]) -> Recurrence:
        """Return the description of a call with `tensors`, which do not include the state."""
        axis = RULES[operator](tensors).axis
        operands = tensors[_REPLAYABLE[operator] :]
        return cls(operator, axis, tuple(x.movedim(axis, 1).shape[2:] for x in operands))

    @property
    def width(self) -> int:
        """The number of elements that are logged for a token."""
        return sum(shape.numel() for shape in self.shapes)

    def pack(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the log `[1, LENGTH, width]` of a call for one row. Tokens beyond `LENGTH` are left out."""
        operands = tensors[_REPLAYABLE[self.operator] :]
        return _fit(torch.cat([x.movedim(self.axis, 1).flatten(2) for x in operands], -1), 1, LENGTH)

    def replay(self, log: torch.Tensor, kept: int, state: torch.Tensor) -> torch.Tensor:
        """Return the state after the first `kept` tokens of `log`. `state` is the state before these tokens."""
        parts = log[:, :kept].split([shape.numel() for shape in self.shapes], -1)
        operands = [x.unflatten(-1, shape).movedim(1, self.axis) for x, shape in zip(parts, self.shapes)]
        # Only the state is used, so any operand of the right shape can be the query.
        queries = operands[: _REPLAYABLE[self.operator]]
        return self.operator(*queries, *operands, state)[1]


class Log:
    """A buffer of the module `owner` that holds a value `[1, *shape]` from a call of `verify` to the next call.

    All rows share it. The shape of the buffer is `[1, 1, P, C]`, where C is the last of `shape`. P is a multiple of
    `rows`: like that of all buffers, its axis 2 can then be divided among the rows.
    """

    def __init__(self, owner: torch.nn.Module, name: str, shape: torch.Size, dtype: torch.dtype, rows: int):
        self.owner, self.name, self.shape = owner, name, shape
        self.entries = shape[:-1].numel()
        owner.register_buffer(name, torch.zeros(1, 1, self.entries + -self.entries % rows, shape[-1], dtype=dtype))

    @property
    def buffer(self) -> torch.Tensor:
        return getattr(self.owner, self.name)

    def read(self, cache: Any) -> torch.Tensor:
        """Return the value.

        A method has to write a buffer to share it with other methods; otherwise the buffer is a constant of the method.
        `read` therefore writes the first entry again.
        """
        updated = self._update(cache, self.buffer[:, :, :1])
        return updated[:, :, : self.entries].reshape(1, *self.shape)

    def write(self, cache: Any, value: torch.Tensor) -> None:
        self._update(cache, value.reshape(1, 1, -1, self.shape[-1]).to(self.buffer.dtype))

    def _update(self, cache: Any, entries: torch.Tensor) -> torch.Tensor:
        """Write the first entries, and return the updated buffer."""
        updated = torch.ops.mlx.cache_update(self.buffer, entries, cache.origin, False, None, 1)
        self.buffer.copy_(updated)
        return updated


def _fit(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    """Return the first `length` slices of `x` on `axis`. If there are fewer, zeros follow."""
    shape = list(x.shape)
    shape[axis] = length
    return torch.cat([x, x.new_zeros(shape)], axis).narrow(axis, 0, length)


def fit_columns(joined: torch.Tensor, taps: int) -> torch.Tensor:
    """Return the log `[..., taps + LENGTH]` of a convolution: its old state of `taps` inputs, then new inputs."""
    return _fit(joined, -1, taps + LENGTH)
