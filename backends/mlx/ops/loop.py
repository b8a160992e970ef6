"""Lowers `scan` and `map` to `ScanNode`, and `while_loop` to `WhileNode`, which is an extension."""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import TensorSlot, ValueSlot
from ..serialization import ir
from .lib.loop import assign, emit_scan


@REGISTRY.lower(torch.ops.higher_order.scan)
def scan(P: Lowering, arguments):
    """Lower a loop over the first axis of the tensors `xs`.

    Returns the slots of the final carry, then the slots of the stacked outputs. Before the loop, the initial carry is
    copied into the slots of the carry. Each iteration of the body overwrites them.
    """
    body, init, xs, additional = arguments
    if not xs:
        raise Unsupported("a scan without xs is unsupported; pass a tensor whose first axis gives the number of steps")
    return _scan(P, body, init, xs, additional)


@REGISTRY.lower(torch.ops.higher_order.map_impl)
def map_(P: Lowering, arguments):
    """Lower a loop without a carry over the first axis of `xs`. Returns the slots of the stacked outputs."""
    body, xs, additional = arguments
    return _scan(P, body, [], xs, additional)


def _scan(P: Lowering, body, init, xs, additional):
    if any(isinstance(a, ValueSlot) for a in (*init, *xs)):
        raise Unsupported("a Python number as carry or input is unsupported; use a tensor")
    init = [P.cast(value, out.dtype) for value, out in zip(init, P.out)]
    stacked = [P.fresh(v) for v in P.out[len(init) :]]
    carry = emit_scan(P, lambda carry, slices: P.inline(body, [*carry, *slices, *additional]), init, xs, stacked)
    return [*carry, *stacked]


@REGISTRY.lower(torch.ops.higher_order.while_loop)
def while_loop(P: Lowering, arguments):
    """Lower a while loop to a chain for the condition and a chain for the body. Returns the slots of the carry."""
    condition, body, init, additional = arguments
    if not all(isinstance(a, TensorSlot) for a in init):
        raise Unsupported("a Python number as carry is unsupported; use a tensor")
    carry = [P.fresh(v) for v in P.out]
    for slot, value in zip(carry, init, strict=True):
        P.emit(ir.IdCopyNode, x=P.cast(value, slot.dtype), out=slot)
    with P.chain() as condition_chain:
        (predicate,) = P.inline(condition, [*carry, *additional])
        predicate = P.item(predicate) if isinstance(predicate, TensorSlot) else predicate
    with P.chain() as body_chain:
        assign(P, P.inline(body, [*carry, *additional]), carry)
    P.emit(ir.WhileNode, cond=predicate, carry=carry, cond_chain_idx=condition_chain, body_chain_idx=body_chain)
    return carry
