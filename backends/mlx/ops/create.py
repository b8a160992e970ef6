"""Operators that create tensors, such as full, zeros_like, arange, tril_indices and fft_fftfreq; also tril and triu.

The IR nodes are `FullNode`, `FullLikeNode`, `ARangeNode`, `TrilNode` and `TriuNode`. The result of `empty` is filled
with zeros.
"""

from __future__ import annotations

import torch

from ..builder import dtypes
from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import ValueSlot
from ..serialization import ir

aten = torch.ops.aten


@REGISTRY.lower(aten.full.default)
def full(P: Lowering, size, fill_value, dtype):
    return P.full(size, fill_value, P.out.dtype)


@REGISTRY.lower(aten.zeros.default, aten.empty.memory_format, torch.ops.dim_order_ops._empty_dim_order.default)
def zeros(P: Lowering, size, dtype):
    return P.full(size, 0, P.out.dtype)


@REGISTRY.lower(aten.ones.default)
def ones(P: Lowering, size, dtype):
    return P.full(size, 1, P.out.dtype)


@REGISTRY.lower(aten.scalar_tensor.default, torch.ops.prims.scalar_tensor.default)
def scalar_tensor(P: Lowering, s, dtype):
    return P.scalar(s, P.out.dtype)


def _full_like(P: Lowering, x, value):
    dtype = P.out.dtype
    if isinstance(value, int) and float(value) != value:  # the field of `FullLikeNode` is a float64
        return P.full([P.size(x, i) for i in range(x.ndim)], value, dtype)
    number = int(value) if isinstance(value, bool) else value
    return P.emit(ir.FullLikeNode, x=x, v=number, scalar_type=dtypes.scalar_type(dtype))


@REGISTRY.lower(aten.full_like.default)
def full_like(P: Lowering, self, fill_value, dtype):
    return _full_like(P, self, fill_value)


@REGISTRY.lower(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(P: Lowering, self, dtype):
    return _full_like(P, self, 0)


@REGISTRY.lower(aten.ones_like.default)
def ones_like(P: Lowering, self, dtype):
    return _full_like(P, self, 1)


@REGISTRY.lower(aten.fill.Scalar)
def fill(P: Lowering, self, value):
    return _full_like(P, self, value)


@REGISTRY.lower(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(P: Lowering, end, start=0, step=1, dtype=None):
    numbers = (start, end, step)
    if any(isinstance(v, float) and not v.is_integer() for v in numbers):
        return _constant_arange(P, start, step)
    if any(isinstance(v, ValueSlot) and v.kind is float for v in numbers):
        raise Unsupported("a float that is known only at run time is unsupported; use integers and scale the result")
    out = P.out.dtype
    # MLX adds the step again and again in the dtype, in which a float stops growing where it has no fraction any more.
    counted = torch.int64 if out.is_floating_point else out
    start, end, step = (v if isinstance(v, ValueSlot) else int(v) for v in numbers)
    # MLX takes the bounds as float64, which cannot hold all larger integers.
    offset = start if isinstance(start, int) and abs(start) > 2**53 else 0
    if offset:
        start, end = 0, end - offset if isinstance(end, int) else P.emit(ir.SubtractIntNode, a=end, b=offset)
    result = P.emit(ir.ARangeNode, start=start, stop=end, step=step, scalar_type=dtypes.scalar_type(counted))
    if offset:
        result = P.emit(ir.AddNode, a=result, b=P.scalar(offset, counted))
    return P.cast(result, out)


def _constant_arange(P: Lowering, start, step):
    """Compute start + i * step as a constant, which requires a static number of elements.

    If the result has integers, torch truncates `start` and `step` first.
    """
    count, out = P.out.shape[0], P.out.dtype
    if not isinstance(count, int):
        raise Unsupported(
            "a fractional start, end or step with a dynamic length is unsupported; use torch.arange(n) * step + start"
        )
    start, step = (v if out.is_floating_point else int(v) for v in (start, step))
    data = torch.arange(count, dtype=torch.float64 if out.is_floating_point else torch.int64) * step + start
    return P.constant("arange", data.to(out))


def _triangle_indices(function):
    def lower(P: Lowering, row, col, offset, dtype):
        return P.constant("indices", function(row, col, offset, dtype=P.out.dtype))

    return lower


REGISTRY.add(aten.tril_indices.default, _triangle_indices(torch.tril_indices))
REGISTRY.add(aten.triu_indices.default, _triangle_indices(torch.triu_indices))


def _frequencies(function, dynamic_form):
    def lower(P: Lowering, n, d, dtype):
        if not isinstance(n, int):
            raise Unsupported(f"a dynamic number of frequencies is unsupported; use {dynamic_form}")
        return P.constant("frequencies", function(n, d, dtype=P.out.dtype))

    return lower


REGISTRY.add(
    aten.fft_fftfreq.default, _frequencies(torch.fft.fftfreq, "((torch.arange(n) + n // 2) % n - n // 2) / (n * d)")
)
REGISTRY.add(aten.fft_rfftfreq.default, _frequencies(torch.fft.rfftfreq, "torch.arange(n // 2 + 1) / (n * d)"))


@REGISTRY.lower(aten.tril.default)
def tril(P: Lowering, self, diagonal):
    return P.emit(ir.TrilNode, x=self, k=diagonal)


@REGISTRY.lower(aten.triu.default)
def triu(P: Lowering, self, diagonal):
    return P.emit(ir.TriuNode, x=self, k=diagonal)
