"""Applies `as_strided` to the tensor whose storage it reads, because functional graphs have no storages.

In eager torch, `size`, `stride` and `storage_offset` index the storage that underlies the operand. If the operand is a
view, ExecuTorch's graphs replace it by a copy, which has another storage.
"""

from __future__ import annotations

import math
import operator

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef

aten = torch.ops.aten


def read_storages(program: ExportedProgram) -> None:
    """Give each `as_strided` of a view in `program`, in place, the tensor of which it is a view as operand.

    Raises ValueError if the elements of that tensor do not lie in its storage in row-major order.
    """
    for node in program.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        operand, size, stride, *offset = node.args
        base = _base(operand)
        if base is operand and not _may_return_view(base):
            continue
        if not _fills_its_storage(base.meta["val"]):
            raise ValueError(
                f"{node.target} ({node.name}): the operand is a view of a tensor that is not row-major; copy it with "
                ".clone(memory_format=torch.contiguous_format) and use the strides of the copy"
            )
        offset = offset[0] if offset and offset[0] is not None else operand.meta["val"].storage_offset()
        if _may_return_view(base):  # for ExecuTorch, it always does
            with program.graph.inserting_before(node):
                copy = program.graph.call_function(aten.clone.default, (base,))
            copy.meta = dict(base.meta)
            base = copy
        node.args = (base, size, stride, offset)


def _base(node: Node) -> Node:
    """Return the node that computes the storage of the result of `node`: `node` itself, unless that is a view."""
    while node.op == "call_function":
        call = node.args[0] if node.target is operator.getitem else node
        if not _may_return_view(call) or not _share_storage(node.meta["val"], call.args[0].meta["val"]):
            break
        node = call.args[0]
    return node


def _may_return_view(node: Node) -> bool:
    """Whether `node` calls an operator that returns a view or, as `reshape` does, a view or a copy."""
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return any(r.alias_info is not None for r in returns)


def _share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage())


def _fills_its_storage(x: torch.Tensor) -> bool:
    size = math.prod(x.shape) * x.dtype.itemsize
    starts = x.is_contiguous() and statically_known_true(x.storage_offset() == 0)
    return starts and statically_known_true(x.untyped_storage().nbytes() == size)
