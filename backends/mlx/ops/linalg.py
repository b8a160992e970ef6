"""Lowers matrix products (mm, bmm, matmul, addmm, linear) to `AddmmNode`, and products of experts to `GatherMmNode`."""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..custom_ops import quantized
from ..serialization import ir

aten = torch.ops.aten


def _check_floating(x):
    if not x.dtype.is_floating_point:
        raise Unsupported(f"a matrix product of {x.dtype}: MLX multiplies only matrices of floating-point numbers")


@REGISTRY.lower(aten.mm.default, aten.bmm.default, aten.matmul.default)
def matmul(P: Lowering, self, mat2=None, other=None):
    _check_floating(self)
    return P.emit(ir.AddmmNode, mat1=self, mat2=other if mat2 is None else mat2)


@REGISTRY.lower(aten.addmm.default)
def addmm(P: Lowering, self, mat1, mat2, beta, alpha):
    _check_floating(mat1)
    bias = None if beta == 0 else self  # with beta = 0, torch ignores NaN in `self`
    return P.emit(ir.AddmmNode, mat1=mat1, mat2=mat2, bias=bias, beta=float(beta), alpha=float(alpha))


@REGISTRY.lower(aten.linear.default)
def linear(P: Lowering, input, weight, bias=None):
    _check_floating(input)
    transposed = P.emit(ir.TransposeNode, x=weight, perm=list(range(weight.ndim))[::-1])
    return P.emit(ir.AddmmNode, mat1=input, mat2=transposed, bias=bias)


@REGISTRY.lower(quantized.gathered_matmul)
def gathered_matmul(P: Lowering, x, weight, index):
    transposed = P.emit(ir.TransposeNode, x=weight, perm=[0, 2, 1])
    return P.emit(ir.GatherMmNode, a=x, b=transposed, rhs_indices=index)
