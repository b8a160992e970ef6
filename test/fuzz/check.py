"""Exports programs, runs them, and compares with eager torch."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner

from .programs import EXTENTS, Batch, Program

# Relative rounding error of one operation, by dtype.
_EPSILON = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}
_NOISY_RUNS = 4
_SPREAD_FACTOR = 8  # how far beyond the spread of noisy runs a result may lie


class WrongAnswer(AssertionError):
    """The runtime's result differs from eager torch by more than rounding explains."""


@dataclass
class Counts:
    """What became of the programs of a run."""

    programs: int = 0
    compared: int = 0
    not_exported: Counter = field(default_factory=Counter)
    not_delegated: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        exported, delegated = (sum(c.values()) for c in (self.not_exported, self.not_delegated))
        return (
            f"{self.programs} programs: {self.compared} compared, {delegated} not delegated as a whole, "
            f"{exported} refused by torch.export"
        )


def check(
    programs: Sequence[Program],
    counts: Counts | None = None,
    report: Callable[[Exception], None] | None = None,
) -> None:
    """Export and run programs, and compare them with eager torch.

    All programs are exported as one module, which is faster. A failure is narrowed down to one program, and its source
    is added to the message. `report` gets each failure; without it, the first is raised.
    """
    counts = counts if counts is not None else Counts()
    programs = [p for p in programs if _runs(p)]
    counts.programs += len(programs)
    _check_half_by_half(programs, counts, report)


def _check_half_by_half(programs, counts: Counts, report) -> None:
    if not programs:
        return
    try:
        _check_together(programs, counts)
    except Exception as failure:
        if len(programs) > 1:
            middle = len(programs) // 2
            _check_half_by_half(programs[:middle], counts, report)
            _check_half_by_half(programs[middle:], counts, report)
        elif isinstance(failure, _ExportRefused):
            counts.not_exported[str(failure).splitlines()[0][:100]] += 1
        else:
            located = type(failure)(f"{failure}\n\n{programs[0].source()}")
            if report is None:
                raise located from failure
            report(located)


def _runs(program: Program) -> bool:
    """Whether eager torch accepts the program."""
    try:
        program.run(program.arguments(EXTENTS[0]))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return True


class _ExportRefused(Exception):
    """torch.export cannot capture the program: not a failure of this project."""


def _check_together(programs: Sequence[Program], counts: Counts) -> None:
    batch = Batch(programs).eval()
    dynamic = batch.dynamic_shapes() is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        lowered, declined = _lower(batch)
    if declined:
        counts.not_delegated.update(declined.values())
        rest = [p for i, p in enumerate(programs) if i not in declined]
        return _check_together(rest, counts) if rest else None
    method = _load(lowered)
    for extent in EXTENTS if dynamic else EXTENTS[:1]:
        arguments = [t for p in programs for t in p.arguments(extent)]
        actual = iter(method.execute(arguments))
        for program in programs:
            results = [next(actual) for _ in program.outputs]
            if extent == EXTENTS[0] or program.is_dynamic:
                compare(program, extent, results)
    counts.compared += len(programs)


def _lower(batch: Batch):
    """The lowered module, and the programs that the partitioner did not delegate whole: index -> reason."""
    example = tuple(t for p in batch.programs for t in p.arguments(EXTENTS[0]))
    try:
        with torch.no_grad():
            exported = torch.export.export(batch, example, dynamic_shapes=batch.dynamic_shapes())
    except Exception as error:  # torch's own refusals have many types
        raise _ExportRefused(f"{type(error).__name__}: {error}") from error
    partitioner = _Partitioner()
    lowered = to_edge_transform_and_lower(
        exported, partitioner=[partitioner], compile_config=EdgeCompileConfig(_check_ir_validity=False)
    )
    owners = [i for i, program in enumerate(batch.programs) for _ in program.outputs]
    return lowered, {owners[output]: reason for output, reason in partitioner.declined.items()}


class _Partitioner(MLXPartitioner):
    """Also tells which outputs of the graph depend on a node that was not delegated."""

    def __init__(self):
        super().__init__(allow_extensions=True)
        self.declined: dict[int, str] = {}

    def partition(self, exported_program):
        result = super().partition(exported_program)
        reasons = {d.node: f"{d.target}: {d.reason}" for d in self.explain().refused}
        output = exported_program.graph.output_node()
        for node in exported_program.graph.nodes:
            if node.name in reasons:
                for index in _outputs_of(node, output):
                    self.declined[index] = reasons[node.name]
        return result


def _outputs_of(node, output) -> set[int]:
    """Places among the outputs that depend on `node`."""
    reached, open_nodes = {node}, [node]
    while open_nodes:
        users = [u for u in open_nodes.pop().users if u not in reached]
        reached.update(users)
        open_nodes += users
    return {i for i, value in enumerate(output.args[0]) if value in reached}


def _load(lowered):
    from executorch_mlx import Runtime

    program = Runtime.get().load_program(bytes(lowered.to_executorch().buffer))
    method = program.load_method("forward")
    method.keep = program  # a program has to outlive its methods
    return method


def compare(program: Program, extent: int, results: Sequence[torch.Tensor]) -> None:
    """Raises WrongAnswer if `results` differ from eager torch by more than rounding explains.

    The tolerance of each element comes from eager runs in which every intermediate value is
    off by a rounding error: where these differ, so may the runtime.
    """
    arguments = program.arguments(extent)
    try:
        expected = program.run(arguments)
    except RuntimeError:
        return  # valid for the extent at export only
    epsilon = max((_EPSILON.get(t.dtype, 0) for t in (*arguments, *expected)), default=0) or _EPSILON[torch.float32]
    noisy = [program.run(arguments, _noise(epsilon, seed)) for seed in range(_NOISY_RUNS)]
    for index, (a, e) in enumerate(zip(results, expected, strict=True)):
        if a.shape != e.shape and extent == 1:
            return  # torch.export assumes that a dynamic extent does not broadcast
        if a.dtype != e.dtype or a.shape != e.shape:
            raise WrongAnswer(
                f"output {index} at n = {extent}: got {a.dtype} {list(a.shape)}, expected {e.dtype} {list(e.shape)}"
            )
        wrong = _wrong(a, e, [run[index] for run in noisy], epsilon)
        if wrong.any():
            places = wrong.nonzero()[:3].tolist()
            raise WrongAnswer(
                f"output {index} at n = {extent}: {int(wrong.sum())} of {wrong.numel()} elements differ, at {places}"
                f"\n  got      {a[wrong][:6].tolist()}\n  expected {e[wrong][:6].tolist()}"
            )


def _noise(epsilon: float, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def noise(value):
        if isinstance(value, (tuple, list)):
            return type(value)(map(noise, value)) if type(value) in (tuple, list) else value
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        sign = torch.randint(0, 2, value.shape, generator=generator) * 2.0 - 1
        return (value.double() * (1 + epsilon * sign)).to(value.dtype)

    return noise


def _wrong(actual, expected, noisy, epsilon) -> torch.Tensor:
    if not expected.is_floating_point():
        unstable = torch.zeros(expected.shape, dtype=torch.bool)
        for run in noisy:
            unstable |= run != expected
        return (actual != expected) & ~unstable
    a, e = actual.double(), expected.double()
    runs = torch.stack([run.double() for run in noisy])
    stable_kind = (runs.isnan() == e.isnan()).all(0) & (runs.isinf() == e.isinf()).all(0)
    spread = (runs - e).abs().nan_to_num(0, 0, 0).amax(0)
    scale = float(e[e.isfinite()].abs().max()) if e.isfinite().any() else 0.0
    tolerance = _SPREAD_FACTOR * spread + 4 * epsilon * e.abs().nan_to_num(0, 0, 0) + epsilon * min(scale, 1.0)
    same = (a == e) | (a.isnan() & e.isnan()) | ((a - e).abs() <= tolerance)
    return ~same & stable_kind
