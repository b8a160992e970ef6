"""How runtimes take a program, apart from single nodes: `nodes.py` has those."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from executorch_mlx.serialization import ir

from .arrays import MLX_DTYPES

LARGEST = 4 << 30  # bytes of a tensor that is made from numbers


class Refused(Exception):
    """The runtime returns an error."""


class Undefined(Refused):
    """The runtime checks nothing here. It reads memory that holds anything, or the result depends on the device."""


@dataclass(frozen=True)
class Meaning:
    """How a runtime takes a program.

    Args:
        name: which runtime this is.
        nodes: the function of each IR node.
        number_bits: the size of numbers outside tensors. Integer literals are clamped to it, and an integer result or
            input that does not fit is an error. Float literals are rounded to it.
        dtypes: the ScalarTypes of tensors.
        empty: whether tensors that are made from numbers may have no elements. If not, all inputs of a method may not
            be empty either, since they then have no memory.
        any_layout: whether inputs and outputs have the dim order that the file declares. Otherwise, inputs must be
            row-major, and the elements of an output are copied in row-major order whatever its dim order is.
        shared_buffers: whether methods share the mutable buffers of one name, which start with the initial values in
            the file. Otherwise, each method has its own buffers, which start with zeros.
        constant_destination: whether the first operand of an update may be a constant, which is copied.
    """

    name: str
    nodes: Mapping[type[ir.Op], Callable]
    number_bits: int
    dtypes: frozenset[int]
    empty: bool
    any_layout: bool
    shared_buffers: bool
    constant_destination: bool

    def clamped(self, x: int) -> int:
        limit = 1 << (self.number_bits - 1)
        return max(-limit, min(x, limit - 1))

    def checked(self, x: int, what: str) -> int:
        if x != self.clamped(x):
            raise Refused(f"{what}: {x} does not fit in {self.number_bits} bits")
        return x

    def dtype(self, scalar_type: int) -> mx.Dtype:
        if scalar_type not in self.dtypes:
            raise Refused(f"ScalarType {scalar_type} is not supported")
        return MLX_DTYPES[scalar_type]

    def shape(self, shape: Sequence[int], dtype: mx.Dtype) -> list[int]:
        """Check the shape of a tensor that is made from numbers."""
        if any(size < 0 or (size == 0 and not self.empty) for size in shape):
            raise Refused(f"shape {list(shape)}: invalid size")
        if math.prod(shape) * dtype.size > LARGEST:
            raise Refused(f"shape {list(shape)} is larger than {LARGEST} bytes")
        return list(shape)
