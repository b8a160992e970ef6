"""Run a lowered row and compare it with eager torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .lowering import Lowered
    from .row import Row


class Failure(AssertionError):
    """A row does not hold."""


def checks(rows: Sequence[Row]):
    """The pytest function of a file of rows."""
    import pytest

    from .lowering import lower

    @pytest.mark.parametrize("row", rows, ids=str)
    def test(row, delegate):
        run_in_process(row, lower(row))

    return test


def run_in_process(row: Row, lowered: Lowered) -> None:
    """Run through ExecuTorch's Python runtime; `load_delegate()` comes first."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(lowered.pte)
    method = program.load_method("forward")
    for call, (inputs, expected) in enumerate(lowered.calls):
        compare(row, call, method.execute(list(inputs)), expected)


def compare(
    row: Row, call: int, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    """Count, dtype, shape, values, and the sign of zeros where the row asks for it."""
    if len(actual) != len(expected):
        raise Failure(f"call {call}: {len(actual)} outputs, {len(expected)} expected")
    for i, (a, e) in enumerate(zip(actual, expected)):
        problem = _difference(row, a, e)
        if problem:
            raise Failure(f"call {call}, output {i} ({e.dtype}): {problem}\n"
                          f"  actual   {_short(a)}\n  expected {_short(e)}")


def _difference(row: Row, a: torch.Tensor, e: torch.Tensor) -> str | None:
    if a.dtype != e.dtype or a.shape != e.shape:
        return f"{a.dtype} {list(a.shape)}, expected {e.dtype} {list(e.shape)}"
    a, e = _comparable(a), _comparable(e)
    if e.is_floating_point():
        tolerance = row.tolerance_of(e.dtype)
        close = torch.isclose(a, e, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        close = a == e
    if not close.all():
        wrong = (~close).nonzero()[:5].tolist()
        return f"{int((~close).sum())} of {e.numel()} elements differ, at {wrong}"
    if row.signed_zero and e.is_floating_point():
        flipped = (e == 0) & (a == 0) & (a.signbit() != e.signbit())
        if flipped.any():
            return f"zeros of the wrong sign at {flipped.nonzero()[:5].tolist()}"
    return None


def _comparable(t: torch.Tensor) -> torch.Tensor:
    """torch compares no unsigned integers wider than a byte."""
    return t.to(torch.int64) if t.dtype in (torch.uint16, torch.uint32) else t


def _short(t: torch.Tensor) -> str:
    return " ".join(repr(t).split())[:1000]
