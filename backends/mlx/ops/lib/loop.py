"""Emits loops as `ScanNode`, and the assignments at the end of a loop's body. `P` is the `Lowering`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...builder.lowering import Lowering
from ...builder.slots import TensorSlot
from ...serialization import ir


def emit_loop(
    P: Lowering, iteration: Callable, state: Sequence[TensorSlot], xs: Sequence[TensorSlot], *fixed: TensorSlot
) -> list[TensorSlot]:
    """Emit a loop over the first axis of the tensors `xs`, and return the slots of the final state.

    `iteration(*state, *slices, *fixed)` is a torch function. It returns the new state, a list of tensors
    with the dtypes and shapes of the old one. `slices` are the slices of `xs`. `fixed` are further operands, which all
    iterations share. The shape of every operand must be known.
    """
    return emit_scan(P, lambda carry, slices: P.trace(iteration, *carry, *slices, *fixed), state, xs)


def emit_scan(
    P: Lowering,
    body: Callable,
    init: Sequence[TensorSlot],
    xs: Sequence[TensorSlot],
    outputs: Sequence[TensorSlot] = (),
    axis: int = 0,
) -> list[TensorSlot]:
    """Emit a loop over `axis` of the tensors `xs`, and return the slots of the final carry.

    `body(carry, slices)` emits the instructions of an iteration. It returns the slots of the new carry, and then the
    slot of a value for each of `outputs`. `carry` has the dtypes and shapes of `init`, the initial carry; `slices` are
    the slices of `xs`. The runtime stacks the values of all iterations along `axis` and writes them to `outputs`.
    """
    carry = [_copy(P, x) for x in init]
    slices = [TensorSlot(x.dtype, x.shape and (*x.shape[:axis], *x.shape[axis + 1 :])) for x in xs]
    with P.chain() as index:
        assign(P, body(carry, slices), [*carry, *outputs])
    P.emit(
        ir.ScanNode,
        originals=list(xs),
        sliced=slices,
        outputs=list(outputs),
        carry=carry,
        body_chain_idx=index,
        scan_axis=axis,
    )
    return carry


def assign(P: Lowering, values: Sequence[TensorSlot], slots: Sequence[TensorSlot]) -> None:
    """Copy `values` into `slots`, all at once: a value may itself be one of `slots`, as in a body that swaps two."""
    overwritten = set(slots)
    values = [_copy(P, value) if value in overwritten else value for value in values]
    for value, slot in zip(values, slots, strict=True):
        P.emit(ir.IdCopyNode, x=value, out=slot)


def _copy(P: Lowering, x: TensorSlot) -> TensorSlot:
    return P.emit(ir.IdCopyNode, x=x, out=TensorSlot(x.dtype, x.shape))
