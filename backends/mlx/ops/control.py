"""Lowers `torch.cond` to `IfNode`. Loops are in `loop.py`."""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import TensorSlot, ValueSlot
from ..serialization import ir


@REGISTRY.lower(torch.ops.higher_order.cond)
def cond(P: Lowering, arguments):
    """Lower each branch to a chain. Both chains write the same result slots, and the runtime runs one of them."""
    predicate, *branches, operands = arguments
    if isinstance(predicate, TensorSlot):
        predicate = P.item(predicate)
    outs = [P.fresh(v) for v in P.out]
    if any(isinstance(o, ValueSlot) for o in outs):
        raise Unsupported("a branch that returns a Python number is unsupported; return a tensor")
    indices = []
    for branch in branches:
        with P.chain() as index:
            for out, value in zip(outs, P.inline(branch, operands), strict=True):
                P.emit(ir.IdCopyNode, x=P.cast(value, out.dtype), out=out)
        indices.append(index)
    P.emit(ir.IfNode, cond=predicate, then_chain_idx=indices[0], else_chain_idx=indices[1])
    return outs
