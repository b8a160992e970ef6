"""Inputs of op rows: each has a shape, a range of values, and optionally a dtype.

An input without a dtype is made in each of the op row's dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
i64, i32 = torch.int64, torch.int32

FLOATS = (f32, f16, bf16)
INTS = (i64, i32, torch.int16, torch.int8, torch.uint8)

_FLOAT_EDGES = (
    "nan",
    "inf",
    "-inf",
    "0",
    "-0",
    "1",
    "-1",
    "0.5",
    "-0.5",
    "1.5",
    "-1.5",
    "2.5",
    "-2.5",
    "3",
    "-3",
    "7",
    "-7.25",
    "100",
    "-100",
    "0.001",
)
_INT_EDGES = (-7, -3, -2, -1, 0, 1, 2, 3, 7)


@dataclass(frozen=True)
class Dyn:
    """A dynamic extent: `size` at export and in the first call, then each of `also` in a further call, then `size`."""

    name: str
    size: int
    also: tuple[int, ...] = (1, 7)
    min: int = 1
    max: int = 16

    @property
    def dim(self) -> torch.export.Dim:
        return torch.export.Dim(self.name, min=self.min, max=self.max)

    def at(self, call: int) -> int:
        """The extent in the `call`-th call."""
        return (self.size, *self.also)[call] if call <= len(self.also) else self.size


@dataclass(frozen=True)
class Input:
    """A recipe for a tensor. `fill(shape, dtype, generator)` makes the values.

    If `dtype` is None, the tensor is made in each of the op row's dtypes.
    """

    shape: tuple[int | Dyn, ...]
    dtype: torch.dtype | None
    fill: Callable[[list[int], torch.dtype, torch.Generator], torch.Tensor]

    def make(self, row_dtype: torch.dtype, call: int, generator: torch.Generator) -> torch.Tensor:
        shape = [e.at(call) if isinstance(e, Dyn) else e for e in self.shape]
        dtype = self.dtype or row_dtype
        return self.fill(shape, dtype, generator).to(dtype)

    @property
    def dynamic(self) -> dict[int, Dyn]:
        return {axis: e for axis, e in enumerate(self.shape) if isinstance(e, Dyn)}


def floats(*shape: int | Dyn, low: float = -3, high: float = 3, dtype=None) -> Input:
    """Uniform values in [low, high): whole numbers if the dtype is an integer, and random bools if it is bool."""

    def fill(shape, dtype, generator):
        if dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if dtype.is_floating_point:
            return low + (high - low) * torch.rand(shape, generator=generator)
        bottom = max(low, torch.iinfo(dtype).min)
        return torch.randint(int(bottom), int(high), shape, generator=generator)

    return Input(shape, dtype, fill)


def ints(*shape: int | Dyn, low: int = -9, high: int = 9, dtype=i64) -> Input:
    """Whole numbers in [low, high)."""
    return floats(*shape, low=low, high=high, dtype=dtype)


def indices(*shape: int | Dyn, below: int, low: int = 0) -> Input:
    """Uniform int64 values in [low, below)."""
    return ints(*shape, low=low, high=below)


def bools(*shape: int | Dyn) -> Input:
    return floats(*shape, dtype=torch.bool)


def spread(*shape: int, dtype=None) -> Input:
    """Distinct whole numbers in random order, for operators that need values without ties.

    With up to 128 elements, the values are distinct in every dtype.
    """

    def fill(shape, dtype, generator):
        count = torch.Size(shape).numel()
        return (torch.randperm(count, generator=generator) - count // 4).reshape(shape)

    return Input(shape, dtype, fill)


def data(values, dtype=None) -> Input:
    """The given values. Without a `dtype`, whole numbers are int64, and floats have the op row's dtypes."""
    tensor = torch.tensor(values)
    shape = tuple(tensor.shape)
    if dtype is None and not tensor.is_floating_point():
        dtype = tensor.dtype
    return Input(shape, dtype, lambda shape, dtype, generator: torch.tensor(values, dtype=dtype))


def edges(*, dtype=None, zeros: bool = True) -> Input:
    """Edge values: NaN, infinities, both zeros, halves; for integer dtypes small numbers of both signs."""

    def fill(shape, dtype, generator):
        if dtype == torch.bool:
            values = [False, True]
        elif dtype.is_floating_point:
            values = [float(v) for v in _FLOAT_EDGES]
        else:
            values = [v for v in _INT_EDGES if v >= torch.iinfo(dtype).min]
        if not zeros:
            values = [v for v in values if v != 0]
        tensor = torch.tensor(values, dtype=dtype)
        return tensor if not shape else tensor.reshape(shape)

    return Input((), dtype, fill)


def edge_column(**options) -> Input:
    """The values of `edges` in shape [n, 1]. Broadcast against `edge_row`, they give every pair of edge values."""
    return _reshaped(edges(**options), (-1, 1))


def edge_row(**options) -> Input:
    """The values of `edges` in shape [1, n]."""
    return _reshaped(edges(**options), (1, -1))


def _reshaped(source: Input, shape: tuple[int, int]) -> Input:
    return Input((), source.dtype, lambda _, dtype, generator: source.fill([], dtype, generator).reshape(shape))
