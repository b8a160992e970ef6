"""Lowers the recurrences of `custom_kernel_ops/recurrence.py`, such as `mlx::gated_delta_rule`, to `ScanNode`.

The body of the loop is the traced rule for a token, or for a block of tokens. If the number of tokens is dynamic and
there is a rule for blocks, an `IfNode` chooses between the two loops at run time.

These loops are the portable forms of `GatedRecurrenceNode` and `SelectiveScanNode`. CPUs run the nodes, and other
devices the loops, which are faster there.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY
from ..builder.slots import TensorSlot
from ..custom_kernel_ops.layer_state import read_layer_state, read_layer_state_definition
from ..custom_kernel_ops.recurrence import (
    MIN_TOKENS_FOR_BLOCKS,
    RULES,
    Rule,
    diagonal_recurrence,
    gated_delta_rule,
    gated_linear_attention,
    selective_scan,
)
from ..extents import bounds
from ..serialization import ir
from .lib.cache_write import add, subtract
from .lib.loop import emit_scan


def _emit_loops(P: Lowering, choose_rule, tensors, state, outs):
    """Emit the loops of a recurrence over `tensors`, and return its results. `outs` are slots for them."""
    rule = choose_rule(tensors)
    # The last operands have no axis of tokens.
    fixed = [tensors.pop() for _ in range(rule.fixed)][::-1]
    length = P.size(tensors[0], rule.axis)
    _, most = bounds(tensors[0].shape[rule.axis])
    if rule.block is None or (most is not None and most < MIN_TOKENS_FOR_BLOCKS):
        return _by_token(P, rule, state, tensors, fixed)
    if isinstance(length, int):
        return _by_block(P, rule, state, tensors, length, outs[0].shape)
    chains = []
    for loop in (
        lambda: _by_block(P, rule, state, tensors, length, outs[0].shape),
        lambda: _by_token(P, rule, state, tensors),
    ):
        with P.chain() as index:
            for value, out in zip(loop(), outs, strict=True):
                P.emit(ir.IdCopyNode, x=value, out=out)
        chains.append(index)
    # The quotient is nonzero from MIN_TOKENS_FOR_BLOCKS tokens on.
    is_many = P.emit(ir.FloorDivideIntNode, a=length, b=MIN_TOKENS_FOR_BLOCKS)
    P.emit(ir.IfNode, cond=is_many, then_chain_idx=chains[0], else_chain_idx=chains[1])
    return outs


def _by_token(P: Lowering, rule: Rule, state, tensors, fixed=()):
    return _scan(P, rule.token, rule.axis, state, tensors, fixed)


def _by_block(P: Lowering, rule: Rule, state, tensors, length, result_shape):
    """Emit a loop over blocks of tokens. Returns the outputs, of `result_shape`, and the last state.

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
    batch, heads, _, width = result_shape
    out = P.emit(ir.ReshapeNode, x=out, shape=[batch, heads, P.emit(ir.MultiplyIntNode, a=count, b=size), width])
    return [P.emit(ir.SliceNode, x=out, axis=2, start=0, stop=length), state]


def _scan(P: Lowering, step, axis, state, tensors, fixed):
    """Emit the loop over `axis` of the tensors. Returns the stacked outputs, and the last state."""

    def body(carry, slices):
        return P.trace(step, *carry, *slices, *fixed)

    output = TensorSlot(state.dtype)
    (last,) = emit_scan(P, body, [state], tensors, [output], axis)
    return [output, last]


def _operands(P: Lowering, arguments):
    return {name: P.cast(x, torch.float32) for name, x in arguments.items()}


@REGISTRY.lower(gated_linear_attention, gated_delta_rule)
def lower_gated_recurrence(P: Lowering, **arguments):
    out, out_state = outs = [P.fresh(v) for v in P.out]
    P.emit(ir.GatedRecurrenceNode, **_operands(P, arguments), out=out, out_state=out_state)
    return outs


@REGISTRY.form(ir.GatedRecurrenceNode, always=True)
def _gated_recurrence(P: Lowering, n, env):
    tensors = [n.query, n.key, n.value, n.decay] + ([] if n.beta is None else [n.beta])
    choose_rule = RULES[gated_linear_attention if n.beta is None else gated_delta_rule]
    return _emit_loops(P, choose_rule, tensors, n.state, [n.out, n.out_state])


@REGISTRY.lower(selective_scan)
def lower_selective_scan(P: Lowering, **arguments):
    out, out_state = outs = [P.fresh(v) for v in P.out]
    P.emit(ir.SelectiveScanNode, **_operands(P, arguments), out=out, out_state=out_state)
    return outs


@REGISTRY.form(ir.SelectiveScanNode, always=True)
def _selective_scan(P: Lowering, n, env):
    tensors = [n.x, n.step, n.key, n.query, n.rates]
    return _emit_loops(P, RULES[selective_scan], tensors, n.state, [n.out, n.out_state])


@REGISTRY.lower(diagonal_recurrence)
def lower_diagonal_recurrence(P: Lowering, **arguments):
    *tensors, state = _operands(P, arguments).values()
    return _emit_loops(P, RULES[diagonal_recurrence], tensors, state, [P.fresh(v) for v in P.out])


@REGISTRY.lower(read_layer_state)
def lower_read_layer_state(P: Lowering, states, start, row=None, rows=1):
    if start.dtype != torch.int64 or (row is not None and row.dtype != torch.int64):
        return P.trace(read_layer_state_definition, states, start, row, rows)[0]
    return P.emit(ir.ReadLayerStateNode, states=states, start=start, row=row)


@REGISTRY.form(ir.ReadLayerStateNode, always=True)
def _read_layer_state(P: Lowering, n, env):
    return P.trace(read_layer_state_definition, n.states, n.start, n.row, n.states.shape[2])[0]
