"""Lowers `mlx::all_sum` and `mlx::all_gather`, which work over a group of processes."""

from __future__ import annotations

from ..builder.registry import REGISTRY
from ..custom_ops.distributed import all_gather as all_gather_op
from ..custom_ops.distributed import all_sum as all_sum_op
from ..serialization import ir


@REGISTRY.lower(all_sum_op)
def all_sum(P, x, rank, size):
    return P.emit(ir.AllSumNode, x=x, rank=rank, size=size, dtype=x.dtype)


@REGISTRY.lower(all_gather_op)
def all_gather(P, x, axis, rank, size):
    return P.emit(ir.AllGatherNode, x=x, axis=axis, rank=rank, size=size, dtype=x.dtype)
