"""What `verify` reports."""

from __future__ import annotations

from dataclasses import dataclass

from .rounding import Comparison


@dataclass(frozen=True)
class CallCheck:
    """One output of one call. `comparison` has the largest difference and the tolerance."""

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
    """The first instruction whose value departs from eager torch.

    - `call`, `method`, `delegate`: the number of the call, the method, and the number of its MLX program.
    - `index`, `op`, `listing`: the number of the instruction in the main chain, its IR node, and its line as
      `executorch-mlx inspect` lists it.
    - `first_index`: the first of the instructions that lower the FX node. If it is less than `index`, the values of
      the instructions between them have no counterpart in the graph.
    - `node`, `target`, `source`: the FX node whose value the instruction computes, the operator that it calls, and
      the line of the model's source. For a fusion, this is its last FX node.
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
            lines.append(f"  instructions {self.first_index} to {self.index} lower its FX node")
        lines.append(f"  FX node {self.node} = {self.target}")
        lines += [f"  {line.strip()}" for line in self.source.splitlines()]
        lines.append(f"  {c.mismatch or f'largest difference {c.difference:.2g}, tolerance {c.tolerance:.2g}'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class VerificationReport:
    """The result of `verify`.

    `outputs` has every output of every call. If one of them departs from eager torch, `departure` is the first
    instruction whose value does, or `note` says why none is named. `seconds` is the time of the check, and
    `added_memory` the number of bytes by which it raised the peak memory of the process.
    """

    outputs: tuple[CallCheck, ...]
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
        lines.append(f"{self.seconds:.1f} s, {self.added_memory / 1e6:.0f} MB above the earlier peak memory")
        return "\n".join(lines)
