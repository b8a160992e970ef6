"""Lowers the recurrences of `custom_kernel_ops/recurrence.py`, such as `mlx::gated_delta_rule`, to `ScanNode`.

The body of the loop is the traced rule for a token, or for a block of tokens. If the number of tokens is dynamic and
there is a rule for blocks, an `IfNode` chooses between the two loops at run time.

On CPUs, the runtime of this project runs `GatedRecurrenceNode` and `SelectiveScanNode` in place of the loops, and
`ReadLayerStateNode` in place of the instructions that read a state. These nodes are always replacements, also where
extensions are allowed, because the loops are faster on other devices.
"""

from __future__ import annotations

from functools import partial

import torch

from ..builder.cache_write import add, subtract
from ..builder.loop import emit_scan
from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, tracing_handler
from ..builder.slots import TensorSlot
from ..custom_kernel_ops.layer_state import read_layer_state, read_layer_state_definition
from ..custom_kernel_ops.recurrence import (
    MIN_TOKENS_FOR_BLOCKS,
    RULES,
    Rule,
    gated_delta_rule,
    gated_linear_attention,
    selective_scan,
)
from ..extents import bounds
from ..serialization import ir

# Operator → the node whose fields are the arguments of the operator.
NODES: dict[torch._ops.OpOverload, type[ir.Op]] = {
    gated_linear_attention: ir.GatedRecurrenceNode,
    gated_delta_rule: ir.GatedRecurrenceNode,
    selective_scan: ir.SelectiveScanNode,
}


def _lowering(choose_rule, node=None):
    """Return the handler of a recurrence.

    `choose_rule` returns the `Rule` for the operands of a call. `node` computes the same results, or is None.
    """

    def lower(P: Lowering, **arguments):
        operands = {name: P.cast(x, torch.float32) for name, x in arguments.items()}
        emit = partial(emit_loops, P, list(operands.values()))
        return emit() if node is None else P.emit_replaceable(node, operands, emit)

    def emit_loops(P: Lowering, operands):
        *tensors, state = operands
        rule = choose_rule(tensors)
        # The last operands have no axis of tokens.
        fixed = [tensors.pop() for _ in range(rule.fixed)][::-1]
        length = P.size(tensors[0], rule.axis)
        _, most = bounds(tensors[0].shape[rule.axis])
        if rule.block is None or (most is not None and most < MIN_TOKENS_FOR_BLOCKS):
            return _by_token(P, rule, state, tensors, fixed)
        if isinstance(length, int):
            return _by_block(P, rule, state, tensors, length)
        outs = [P.fresh(v) for v in P.out]
        chains = []
        for loop in (lambda: _by_block(P, rule, state, tensors, length), lambda: _by_token(P, rule, state, tensors)):
            with P.chain() as index:
                for value, out in zip(loop(), outs, strict=True):
                    P.emit(ir.IdCopyNode, x=value, out=out)
            chains.append(index)
        # The quotient is nonzero from MIN_TOKENS_FOR_BLOCKS tokens on.
        is_many = P.emit(ir.FloorDivideIntNode, a=length, b=MIN_TOKENS_FOR_BLOCKS)
        P.emit(ir.IfNode, cond=is_many, then_chain_idx=chains[0], else_chain_idx=chains[1])
        return outs

    return lower


def _by_token(P: Lowering, rule: Rule, state, tensors, fixed=()):
    return _scan(P, rule.token, rule.axis, state, tensors, fixed)


def _by_block(P: Lowering, rule: Rule, state, tensors, length):
    """Emit a loop over blocks of tokens. Returns the outputs, and the last state.

    The tokens [B, H, S, ...] become blocks [B, H, count, size, ...]. Zeros fill up the last block.
    """
    size = rule.size
    count = P.emit(ir.FloorDivideIntNode, a=add(P, length, size - 1), b=size)
    missing = subtract(P, P.emit(ir.MultiplyIntNode, a=count, b=size), length)
    blocks = []
    for x in tensors:
        zeros = P.full([*x.shape[:2], missing, *x.shape[3:]], 0.0, x.dtype)
        filled = P.emit(ir.ConcatenateNode, tensors=[x, zeros], axis=2)
        block = TensorSlot(x.dtype, (*x.shape[:2], -1, size, *x.shape[3:]))  # -1: the loop runs over this axis
        shape = [*x.shape[:2], count, size, *x.shape[3:]]
        blocks.append(P.emit(ir.ReshapeNode, x=filled, shape=shape, out=block))
    out, state = _scan(P, rule.block, 2, state, blocks, ())
    batch, heads, _, width = P.out[0].shape
    out = P.emit(ir.ReshapeNode, x=out, shape=[batch, heads, P.emit(ir.MultiplyIntNode, a=count, b=size), width])
    return [P.emit(ir.SliceNode, x=out, axis=2, start=0, stop=length), state]


def _scan(P: Lowering, step, axis, state, tensors, fixed):
    """Emit the loop over `axis` of the tensors. Returns the stacked outputs, and the last state."""

    def body(carry, slices):
        return P.trace(step, *carry, *slices, *fixed)

    output = TensorSlot(state.dtype)
    (last,) = emit_scan(P, body, [state], tensors, [output], axis)
    return [output, last]


for _target, _choose_rule in RULES.items():
    REGISTRY.add(_target, _lowering(_choose_rule, NODES.get(_target)))

_trace_read = tracing_handler(read_layer_state, read_layer_state_definition)


@REGISTRY.lower(read_layer_state)
def lower_read_layer_state(P: Lowering, states, start, row=None, rows=1):
    trace = partial(_trace_read, P, states=states, start=start, row=row, rows=rows)
    if start.dtype != torch.int64 or (row is not None and row.dtype != torch.int64):
        return trace()
    return P.emit_replaceable(ir.ReadLayerStateNode, {"states": states, "start": start, "row": row}, trace)
