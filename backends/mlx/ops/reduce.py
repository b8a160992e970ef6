"""Reductions: sum, mean, prod, the extrema, any, all, logsumexp, var, std, argmax, argmin; and cumsum.

The table `REDUCE` maps the name of an ATen operator to its IR node.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..serialization import ir

aten = torch.ops.aten

# ATen name → (IR node, names of the overloads)
REDUCE = {
    "sum": (ir.SumNode, ("default", "dim_IntList")),
    "mean": (ir.MeanNode, ("default", "dim")),
    "prod": (ir.ProdNode, ("default", "dim_int")),
    "amax": (ir.MaxNode, ("default",)),
    "amin": (ir.MinNode, ("default",)),
}


def axes_of(x, dim) -> list[int]:
    """Return `dim`, an argument of a reduction of `x`, as a list. An empty list means all axes.

    `dim` may be None, an int or a list. In torch, 0 and -1 are also axes of a 0-d tensor.
    """
    if dim is None or x.ndim == 0:
        return []
    return list(dim) if isinstance(dim, (list, tuple)) else [dim]


def _reduce(op):
    def lower(P: Lowering, self, dim=None, keepdim=False, dtype=None):
        if P.out.dtype == torch.bool and op not in (ir.MaxNode, ir.MinNode):
            raise Unsupported("a result of dtype bool is unsupported; use torch.any or torch.all")
        # torch computes in the dtype of the result, which is int64 for sums of integers and bools. An extremum of bools
        # is bool. MLX sums and multiplies narrow integers in 32 bits.
        out = P.out.dtype
        is_narrow = op in (ir.SumNode, ir.ProdNode) and not out.is_floating_point and out.itemsize < 4
        dtype = torch.int32 if is_narrow else out
        x = self if out == torch.bool else P.cast(self, dtype)
        return P.cast(P.emit(op, x=x, axes=axes_of(x, dim), keepdims=keepdim), out)

    return lower


for _name, (_op, _overloads) in REDUCE.items():
    REGISTRY.add([getattr(getattr(aten, _name), o) for o in _overloads], _reduce(_op))


def _any_or_all(op):
    def lower(P: Lowering, self, dim=None, keepdim=False):
        if dim == []:  # torch reduces no axis, although an empty list means all axes to other reductions
            return P.cast(P.cast(self, torch.bool), P.out.dtype)
        result = P.emit(op, x=self, axes=axes_of(self, dim), keepdims=keepdim)
        return P.cast(result, P.out.dtype)  # torch's result is uint8 for uint8, else bool

    return lower


for _packet, _op in ((aten.any, ir.AnyNode), (aten.all, ir.AllNode)):
    REGISTRY.add([_packet.default, _packet.dim, _packet.dims], _any_or_all(_op))


REGISTRY.add(aten.logsumexp.default, _reduce(ir.LogSumExpNode))
REGISTRY.add(aten.max.default, _reduce(ir.MaxNode))
REGISTRY.add(aten.min.default, _reduce(ir.MinNode))


def _variance(op):
    def lower(P: Lowering, self, dim=None, correction=1, keepdim=False, unbiased=True):
        ddof = int(unbiased) if correction is None else correction
        if ddof != int(ddof):
            raise Unsupported(f"correction: got {ddof}, expected a whole number")
        return P.emit(op, x=self, axes=axes_of(self, dim), keepdims=keepdim, ddof=int(ddof))

    return lower


def _variance_by_flag(op):
    """Return a handler for the overloads that have the flag `unbiased` in place of `correction`."""

    def lower(P: Lowering, self, unbiased, dim=None, keepdim=False):
        return P.emit(op, x=self, axes=axes_of(self, dim), keepdims=keepdim, ddof=int(unbiased))

    return lower


for _packet, _op in ((aten.var, ir.VarNode), (aten.std, ir.StdNode)):  # type: ignore[assignment]
    REGISTRY.add(_packet.correction, _variance(_op))
    REGISTRY.add([_packet.default, _packet.dim], _variance_by_flag(_op))


def _with_mean(op):
    variance = _variance(op)

    def lower(P: Lowering, self, dim=None, correction=1, keepdim=False):
        mean = P.emit(ir.MeanNode, x=self, axes=axes_of(self, dim), keepdims=keepdim)
        return [variance(P, self, dim, correction, keepdim), mean]

    return lower


REGISTRY.add(aten.var_mean.correction, _with_mean(ir.VarNode))
REGISTRY.add(aten.std_mean.correction, _with_mean(ir.StdNode))


def _arg_reduce(op):
    def lower(P: Lowering, self, dim=None, keepdim=False):
        x = self
        if dim is None:
            x, dim = P.emit(ir.ReshapeNode, x=self, shape=[-1]), 0
            if keepdim and self.ndim != 1:
                index = P.emit(op, x=x, axis=dim, keepdims=True)
                index = P.emit(ir.ReshapeNode, x=index, shape=[1] * self.ndim)
                return P.cast(index, P.out.dtype)
        index = P.emit(op, x=x, axis=dim, keepdims=keepdim)
        return P.cast(index, P.out.dtype)

    return lower


REGISTRY.add(aten.argmax.default, _arg_reduce(ir.ArgmaxNode))
REGISTRY.add(aten.argmin.default, _arg_reduce(ir.ArgminNode))


def _extremum(op, arg_op):
    """Return a handler for max or min along a dimension. The results are the values and their indices."""

    def lower(P: Lowering, self, dim, keepdim=False):
        values = P.emit(op, x=self, axes=[dim] if self.ndim else [], keepdims=keepdim)
        index = P.emit(arg_op, x=self, axis=dim, keepdims=keepdim)
        return [values, P.cast(index, torch.int64)]

    return lower


REGISTRY.add(aten.max.dim, _extremum(ir.MaxNode, ir.ArgmaxNode))
REGISTRY.add(aten.min.dim, _extremum(ir.MinNode, ir.ArgminNode))


@REGISTRY.lower(aten.cumsum.default)
def cumsum(P: Lowering, self, dim, dtype=None):
    x = P.cast(self, P.out.dtype)
    return x if x.ndim == 0 else P.emit(ir.CumsumNode, x=x, axis=dim)
