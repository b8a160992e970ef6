"""torch dtypes, ExecuTorch's numbers for them, and which of them MLX has everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .registry import Unsupported
from .slots import TensorSlot, ValueSlot

# ExecuTorch's ScalarType (runtime/core/portable_type/scalar_type.h), which is c10's.
SCALAR_TYPES: dict[torch.dtype, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
}


def scalar_type(dtype: torch.dtype) -> int:
    try:
        return SCALAR_TYPES[dtype]
    except KeyError:
        raise Unsupported(f"{dtype} is not a dtype that MLX has on every device") from None


# Of these only the bytes are read, and at serialization.
_FLOATS_OF_A_BYTE = {torch.float8_e4m3fn, torch.float8_e8m0fnu}


def check_node(node: Node, bytes_are_enough: bool = False) -> None:
    """`Unsupported` if a tensor that `node` reads or makes has a dtype that MLX lacks.
    `bytes_are_enough`: it may read floats of a byte."""
    operands = [n.meta.get("val") for n in node.all_input_nodes] + [node.meta.get("val")]
    for leaf in tree_leaves(operands):
        if isinstance(leaf, torch.Tensor):
            if not (bytes_are_enough and leaf.dtype in _FLOATS_OF_A_BYTE):
                scalar_type(leaf.dtype)


def promote(*operands: Any) -> torch.dtype:
    """torch's promoted dtype of slots and Python numbers."""
    samples = [_sample(o) for o in operands]
    return torch.result_type(*samples) if len(samples) == 2 else samples[0].dtype


def _sample(operand: Any) -> Any:
    if isinstance(operand, TensorSlot):
        axes = [1] * min(len(operand.shape or ()), 1)
        return torch.empty(axes, dtype=operand.dtype, device="meta")
    return operand.kind() if isinstance(operand, ValueSlot) else operand
