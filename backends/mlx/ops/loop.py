"""Loops. MLX's IR has the scan, whose length is that of its inputs; a loop that ends by what it
computes is a node of ours."""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import TensorSlot, ValueSlot
from ..serialization import ir


@REGISTRY.lower(torch.ops.higher_order.scan)
def scan(P, arguments):
    """Over the first axis of `xs`; the results are the last carry, then what was stacked."""
    body, init, xs, additional = arguments
    if not xs:
        raise Unsupported("scan over nothing: the number of its steps is that of its inputs")
    inputs = [n.meta["val"] for n in body.graph.nodes if n.op == "placeholder"]
    if any(isinstance(a, ValueSlot) for a in (*init, *xs)):
        raise Unsupported("scan over numbers")
    carry = [P.fresh(v) for v in P.out[: len(init)]]
    for slot, value in zip(carry, init, strict=True):
        P.emit(ir.IdCopyNode, x=P.cast(value, slot.dtype), out=slot)
    sliced = [P.fresh(v) for v in inputs[len(init) : len(init) + len(xs)]]
    stacked = [P.fresh(v) for v in P.out[len(init) :]]
    with P.chain() as index:
        results = P.inline(body, [*carry, *sliced, *additional])
        # Read all of the old carry before any of it is written.
        results = [_copy(P, r, TensorSlot(r.dtype, r.shape)) for r in results]
        for result, slot in zip(results, [*carry, *stacked], strict=True):
            _copy(P, result, slot)
    P.emit(
        ir.ScanNode, originals=xs, sliced=sliced, outputs=stacked, carry=carry,
        body_chain_idx=index, scan_axis=0,
    )
    return [*carry, *stacked]


def _copy(P, value, slot):
    return P.emit(ir.IdCopyNode, x=value, out=slot)


@REGISTRY.lower(torch.ops.higher_order.while_loop)
def while_loop(P, arguments):
    condition, body, init, additional = arguments
    if not all(isinstance(a, TensorSlot) for a in init):
        raise Unsupported("while_loop over numbers")
    carry = [P.fresh(v) for v in P.out]
    for slot, value in zip(carry, init, strict=True):
        _copy(P, P.cast(value, slot.dtype), slot)
    with P.chain() as conditions:
        (going,) = P.inline(condition, [*carry, *additional])
        going = P.item(going) if isinstance(going, TensorSlot) else going
    with P.chain() as bodies:
        results = P.inline(body, [*carry, *additional])
        # Read all of the old carry before any of it is written.
        results = [_copy(P, r, TensorSlot(r.dtype, r.shape)) for r in results]
        for result, slot in zip(results, carry, strict=True):
            _copy(P, result, slot)
    P.emit(
        ir.WhileNode, cond=going, carry=carry, cond_chain_idx=conditions, body_chain_idx=bodies
    )
    return carry
