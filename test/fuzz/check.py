"""Compiles programs, runs them, and compares the results with eager torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from executorch_mlx.verification.noise import EPSILON, RoundingNoise
from executorch_mlx.verification.rounding import SPREAD_FACTOR

from .exported import ExportedRoute
from .programs import Program
from .route import CaptureRefused, NotDelegated, Route

EAGER_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
_NOISY_RUNS = 4
_MORE_NOISY_RUNS = 64  # before a result counts as wrong: the spread of a few runs is sometimes too small


class WrongAnswer(AssertionError):
    """Raised if a result of the runtime differs from eager torch by more than rounding explains."""


@dataclass
class Counts:
    """Numbers of programs. `programs` counts those that eager torch runs, and `compared` those that were compared with
    it. `not_exported` and `not_delegated` count other programs by the reason."""

    programs: int = 0
    compared: int = 0
    not_exported: Counter = field(default_factory=Counter)
    not_delegated: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.programs} programs: {self.compared} compared, {self.not_delegated.total()} not delegated "
            f"completely, {self.not_exported.total()} refused by torch"
        )


def check(
    programs: Sequence[Program],
    counts: Counts | None = None,
    report: Callable[[Exception], None] | None = None,
    route: type[Route] = ExportedRoute,
) -> None:
    """Compile and run programs, and compare them with eager torch.

    Each failure is narrowed down to one program, whose source is added to the message. `report` is called
    with each failure. Without `report`, the first failure is raised. The numbers of programs are added to `counts`.
    """
    counts = counts if counts is not None else Counts()
    programs = [p for p in programs if _runs(p)]
    counts.programs += len(programs)
    for program, failure in _failures(programs, counts, route):
        if isinstance(failure, CaptureRefused):
            counts.not_exported[_first_line(failure)] += 1
        elif isinstance(failure, NotDelegated):
            counts.not_delegated[_first_line(failure)] += 1
        elif report is None:
            raise _with_source(failure, program) from failure
        else:
            report(_with_source(failure, program))


def _runs(program: Program) -> bool:
    """Whether eager torch accepts the program at the extent used for export."""
    try:
        program.check_eager()
    except EAGER_REFUSALS:
        return False
    return True


def _failures(programs: Sequence[Program], counts: Counts, route: type[Route]) -> list[tuple[Program, Exception]]:
    """Return the programs that fail, with their failures.

    If compiling or running all programs together raises an error, each half of the list is checked separately.
    """
    if not programs:
        return []
    try:
        compiled = route(programs)
        failures = _compare_all(programs, compiled)
    except Exception as error:
        if len(programs) == 1:
            return [(programs[0], error)]
        middle = len(programs) // 2
        return [*_failures(programs[:middle], counts, route), *_failures(programs[middle:], counts, route)]
    counts.compared += len(programs) - len(compiled.failures)
    return [(programs[index], failure) for index, failure in failures.items()]


def _compare_all(programs: Sequence[Program], compiled: Route) -> dict[int, Exception]:
    """Return the first failure of each program that fails, by the index of the program."""
    failures = dict(compiled.failures)
    for extent in max((p.extents for p in programs), key=len):
        for index, results in compiled.run(extent).items():
            if index in failures or extent not in programs[index].extents:
                continue
            try:
                compare(programs[index], extent, results)
            except Exception as failure:
                failures[index] = failure
    return failures


def _first_line(failure: Exception) -> str:
    return next(iter(str(failure).splitlines()), "")[:100]


def _with_source(failure: Exception, program: Program) -> Exception:
    """Return an exception with the message of `failure`, followed by the source of the program."""
    kind = type(failure) if isinstance(failure, WrongAnswer) else RuntimeError
    name = "" if isinstance(failure, WrongAnswer) else f"{type(failure).__name__}: "
    return kind(f"{name}{failure}\n\n{program.source()}")


def compare(program: Program, extent: int, results: Sequence[torch.Tensor] | Exception) -> None:
    """Raise WrongAnswer if `results` differ from eager torch by more than rounding explains.

    Raises `results` if they are an exception. If eager torch refuses the extent, returns without a comparison.

    The tolerance of each element comes from runs in eager torch with rounding noise. Where the results of these runs
    differ, the result of the runtime may differ too.
    """
    try:
        expected = program.run(extent)
    except EAGER_REFUSALS:
        return  # eager torch accepts this program only at the extent used for export
    if isinstance(results, Exception):
        raise results
    try:
        _compare(extent, results, expected, [_noisy_run(program, extent, seed) for seed in range(_NOISY_RUNS)])
    except WrongAnswer:
        _compare(extent, results, expected, [_noisy_run(program, extent, seed) for seed in range(_MORE_NOISY_RUNS)])


def _compare(extent: int, results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], noisy: list) -> None:
    """Raise WrongAnswer if `results` differ from `expected` by more than the spread of the runs `noisy` explains."""
    for index, (a, e) in enumerate(zip(results, expected, strict=True)):
        if a.shape != e.shape and extent == 1:
            return  # torch.export assumes that a dynamic extent is not 1, so the program does not broadcast it
        if a.dtype != e.dtype or a.shape != e.shape:
            raise WrongAnswer(
                f"output {index} at n = {extent}: got {a.dtype} {list(a.shape)}, expected {e.dtype} {list(e.shape)}"
            )
        wrong = _wrong(a, e, [run[index] for run in noisy])
        if wrong.any():
            places = wrong.nonzero()[:3].tolist()
            raise WrongAnswer(
                f"output {index} at n = {extent}: {int(wrong.sum())} of {wrong.numel()} elements differ, at {places}"
                f"\n  got      {a[wrong][:6].tolist()}\n  expected {e[wrong][:6].tolist()}"
            )


def _noisy_run(program: Program, extent: int, seed: int) -> tuple[torch.Tensor, ...]:
    with RoundingNoise(seed):
        return program.run(extent)


def _wrong(actual, expected, noisy) -> torch.Tensor:
    """Return a bool mask of the elements of `actual` that are outside the tolerance."""
    if not expected.is_floating_point():
        unstable = torch.zeros(expected.shape, dtype=torch.bool)
        for run in noisy:
            unstable |= run != expected
        return (actual != expected) & ~unstable
    a, e = actual.double(), expected.double()
    runs = torch.stack([run.double() for run in noisy])
    is_determined = (runs.isnan() == e.isnan()).all(0) & (runs.isinf() == e.isinf()).all(0)
    spread = (runs - e).abs().nan_to_num(0, 0, 0).amax(0)
    scale = float(e[e.isfinite()].abs().max()) if e.isfinite().any() else 0.0
    epsilon = EPSILON[expected.dtype]
    tolerance = SPREAD_FACTOR * spread + 4 * epsilon * e.abs().nan_to_num(0, 0, 0) + epsilon * min(scale, 1.0)
    same = (a == e) | (a.isnan() & e.isnan()) | ((a - e).abs() <= tolerance)
    return ~same & is_determined
