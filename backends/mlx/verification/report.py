"""The report of `verify`."""

from __future__ import annotations

from dataclasses import dataclass

from .rounding import Comparison


@dataclass(frozen=True)
class OutputCheck:
    """Output number `output` of call number `call`, both counted from 0, compared with eager torch."""

    call: int
    output: int
    comparison: Comparison

    @property
    def ok(self) -> bool:
        return self.comparison.ok

    def __str__(self) -> str:
        c = self.comparison
        verdict = "ok" if c.ok else "DIFFERS"
        values = c.mismatch or f"largest difference {c.difference:.2g}, tolerance {c.tolerance:.2g}"
        return f"call {self.call}, output {self.output}: {verdict}, {values}"


@dataclass(frozen=True)
class Departure:
    """The first instruction whose value departs, that is, differs from eager torch by more than rounding.

    - `call`, `method`, `delegate`: the number of the call, the method, and the number of its MLX program.
    - `index`, `op`, `listing`: the number of the instruction in the main chain, its IR node, and its line as
      `executorch-mlx inspect` lists it.
    - `first_index`: the number of the first instruction that lowers the FX node. The instructions from there to
      `index` compute values that no FX node has, so only the last value is compared.
    - `node`, `target`, `source`: the FX node whose value the instruction computes, the operator that it calls, and
      the line of the model's source. For a fusion, `node` is its last FX node.
    - `comparison`: the difference and the tolerance.
    """

    call: int
    method: str
    delegate: int
    index: int
    first_index: int
    op: str
    listing: str
    node: str
    target: str
    source: str
    comparison: Comparison

    def __str__(self) -> str:
        c = self.comparison
        where = f"call {self.call}, {self.method}, MLX program {self.delegate}, chain 0"
        lines = [f"first departure: {self.op} at instruction {self.index} ({where})", f"  {self.listing.strip()}"]
        if self.first_index < self.index:
            lines.append(f"  instructions {self.first_index} to {self.index} together compute its FX node")
        lines.append(f"  FX node {self.node} = {self.target}")
        lines += [f"  {line.strip()}" for line in self.source.splitlines()]
        lines.append(f"  {c.mismatch or f'largest difference {c.difference:.2g}, tolerance {c.tolerance:.2g}'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class VerificationReport:
    """The result of `verify`.

    `outputs` has an OutputCheck for every output of every call. If an output differs from eager torch by more than
    rounding, `departure` is the first instruction whose value differs; if `departure` is None, `note` says why
    no instruction is named. `seconds` is the time that `verify` took, and `added_memory` the number of bytes by which
    it raised the peak memory of the process.
    """

    outputs: tuple[OutputCheck, ...]
    departure: Departure | None
    note: str | None
    seconds: float
    added_memory: int

    @property
    def ok(self) -> bool:
        """Whether all outputs agree with eager torch up to rounding."""
        return all(check.ok for check in self.outputs)

    def __str__(self) -> str:
        wrong = sum(not check.ok for check in self.outputs)
        verdict = "agrees with eager torch" if self.ok else f"differs from eager torch in {wrong} outputs"
        lines = [f"the program {verdict}", *(f"  {check}" for check in self.outputs)]
        lines += [str(part) for part in (self.departure, self.note) if part is not None]
        lines.append(f"verify took {self.seconds:.1f} s and raised the peak memory by {self.added_memory / 1e6:.0f} MB")
        return "\n".join(lines)
