"""Runs a lowered op row and compares the results with eager torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from executorch_mlx.inspect.portability import file_findings
from executorch_mlx.inspect.pte import read_payloads
from interpreter import OFFICIAL, OURS, Meaning, Program, Refused
from kernel_library import selected_sets
from loaded_method import LoadedMethod

if TYPE_CHECKING:
    from .lowering import Lowered
    from .row import OpRow

DEPENDS_ON_HOST = {
    "mlx::random_bits": "seeds beyond int32",
    "mlx::random_bits/odd widths": "seeds beyond int32",
    "kvcache::update_and_attend": "the app must install a cache",
}
"""Op rows that ExecuTorch's own MLX delegate runs with other inputs only, or with more than a file has."""
NEAR_LIMITS = ("exp/limits", "erf/near zero")
"""Op rows of numbers for which MLX's CPU kernels, which the interpreter uses, are less accurate than the runtime."""


class Failure(AssertionError):
    """Raised if an op row fails. For example, a node was not delegated, or a result is wrong."""


def pytest_function(rows: Sequence[OpRow]):
    """Return the pytest test function for the op rows of a file."""
    import pytest

    from .lowering import lower

    @pytest.mark.parametrize("row", rows, ids=str)
    def test(row, delegate):
        lowered = lower(row)
        run_in_process(row, lowered)
        for _ in selected_sets(delegate) if row.has_kernel else ():
            run_in_process(row, lowered)
        if not row.allow_extensions and row.host is None and row.name not in NEAR_LIMITS:
            run_in_interpreter(row, lowered, OURS)
            if row.name not in DEPENDS_ON_HOST and not reported(lowered):
                run_in_interpreter(row, lowered, OFFICIAL)

    return test


def run_in_process(row: OpRow, lowered: Lowered) -> None:
    """Run a lowered op row in ExecuTorch's Python runtime and compare the results. Raises Failure."""
    method = LoadedMethod(lowered.pte)
    for call, (inputs, expected) in enumerate(lowered.calls):
        compare(row, call, method.execute(list(inputs)), expected)


def reported(lowered: Lowered) -> bool:
    """Whether the portability check finds something in a program, apart from tensors without elements.

    ExecuTorch's own MLX delegate refuses some of those tensors, and computes nothing wrong.
    """
    findings = file_findings(read_payloads(lowered.pte)).values()
    return any(finding.problem.kind != "empty" for method in findings for finding in method)


def run_in_interpreter(row: OpRow, lowered: Lowered, meaning: Meaning) -> None:
    """Run a lowered op row as a runtime with this meaning does, and compare the results. Raises Failure.

    A runtime that refuses tensors without elements may refuse a call with such an input.
    """
    program = Program(lowered.pte, meaning)
    for call, (inputs, expected) in enumerate(lowered.calls):
        try:
            compare(row, call, program.execute("forward", list(inputs)), expected)
        except (Refused, Failure) as failure:
            if isinstance(failure, Refused) and not meaning.empty and any(t.numel() == 0 for t in inputs):
                continue
            raise Failure(f"in the interpreter, {meaning.name}: {failure}") from failure


def compare(row: OpRow, call: int, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Compare the number, dtypes, shapes and values of the outputs. Raises Failure if they differ.

    The signs of zeros are compared too if the op row has `signed_zero`.
    """
    if len(actual) != len(expected):
        raise Failure(f"call {call}: got {len(actual)} outputs, expected {len(expected)}")
    for i, (a, e) in enumerate(zip(actual, expected)):
        difference = _difference(row, a, e)
        if difference:
            raise Failure(
                f"call {call}, output {i} ({e.dtype}): {difference}\n  got      {_short(a)}\n  expected {_short(e)}"
            )


def _difference(row: OpRow, a: torch.Tensor, e: torch.Tensor) -> str | None:
    """Describe how the actual output `a` differs from the expected output `e`. None if they agree."""
    if a.dtype != e.dtype or a.shape != e.shape:
        return f"got {a.dtype} {list(a.shape)}, expected {e.dtype} {list(e.shape)}"
    a, e = _comparable(a), _comparable(e)
    if e.is_floating_point():
        rtol, atol = row.tolerance(e.dtype)
        close = torch.isclose(a, e, rtol=rtol, atol=atol, equal_nan=True)
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
    """Return `t` in a dtype that torch can compare: torch cannot compare uint16 and uint32 tensors."""
    return t.to(torch.int64) if t.dtype in (torch.uint16, torch.uint32) else t


def _short(t: torch.Tensor) -> str:
    return " ".join(repr(t).split())[:1000]
