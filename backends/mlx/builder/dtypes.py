"""The dtypes that MLX supports on every device, and their numbers in the IR."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .registry import Unsupported
from .slots import TensorSlot, ValueSlot

# The number of each torch dtype in ExecuTorch's enum ScalarType (runtime/core/portable_type/scalar_type.h). The numbers
# are the same in torch's enum c10::ScalarType.
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
    """Return the number of `dtype` in the IR. Raises `Unsupported` if MLX lacks the dtype on some device."""
    try:
        return SCALAR_TYPES[dtype]
    except KeyError:
        remedy = '; use float32, or MLXPartitioner(legalize=("float64",))' if dtype == torch.float64 else ""
        raise Unsupported(f"{dtype} is not supported by MLX on every device{remedy}") from None


HALVES = (torch.float16, torch.bfloat16)

_COMPLEX_ERROR = (
    'complex numbers are not supported by MLX programs; MLXPartitioner(legalize=("complex",)) computes with pairs of '
    "real tensors, except as input or output; pass torch.view_as_real(x)"
)


def check_node(node: Node, allowed: Collection[torch.dtype] = ()) -> None:
    """Raise `Unsupported` if an operand or the result of `node` has a dtype that MLX lacks, except those `allowed`."""
    operands = [n.meta.get("val") for n in node.all_input_nodes] + [node.meta.get("val")]
    for leaf in tree_leaves(operands):
        if isinstance(leaf, torch.Tensor):
            if leaf.dtype.is_complex:
                raise Unsupported(_COMPLEX_ERROR)
            if leaf.dtype not in allowed:
                scalar_type(leaf.dtype)


def promote(*operands: Any) -> torch.dtype:
    """Return the dtype to which torch promotes two operands, slots or Python numbers, or the dtype of one tensor."""
    examples = [_example(o) for o in operands]
    return torch.result_type(*examples) if len(examples) == 2 else examples[0].dtype


def _example(operand: Any) -> Any:
    if isinstance(operand, TensorSlot):
        shape = [1] if operand.shape else []  # promotion treats 0-d tensors differently
        return torch.empty(shape, dtype=operand.dtype, device="meta")
    return operand.kind() if isinstance(operand, ValueSlot) else operand
