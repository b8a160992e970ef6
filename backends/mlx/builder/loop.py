"""Emits a loop with a fixed number of iterations, as `ScanNode`. `P` is the `ProgramBuilder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..serialization import ir
from .slots import TensorSlot


def emit_loop(
    P: Any, iteration: Callable, state: Sequence[TensorSlot], xs: Sequence[TensorSlot], *fixed: TensorSlot
) -> list[TensorSlot]:
    """Emit a loop over the first axis of the tensors `xs`, and return the slots of the final state.

    `iteration(*state, *slices, *fixed)` is a torch function. It returns the new state, a list of tensors
    with the dtypes and shapes of the old one. `slices` are the slices of `xs`. `fixed` are further operands, which all
    iterations share. The shape of every operand must be known.
    """
    carry = [_copy(P, s) for s in state]
    slices = [TensorSlot(x.dtype, tuple(x.shape[1:])) for x in xs]
    with P.chain() as body:
        # All results are copied before the state is overwritten, because a result may be a slot of the state: for
        # example, if `iteration` swaps two tensors.
        results = [_copy(P, r) for r in P.trace(iteration, *carry, *slices, *fixed)]
        for result, slot in zip(results, carry, strict=True):
            P.emit(ir.IdCopyNode, x=result, out=slot)
    P.emit(
        ir.ScanNode, originals=list(xs), sliced=slices, outputs=[], carry=carry, body_chain_idx=body, scan_axis=0
    )
    return carry


def _copy(P: Any, x: TensorSlot) -> TensorSlot:
    return P.emit(ir.IdCopyNode, x=x, out=TensorSlot(x.dtype, x.shape))
