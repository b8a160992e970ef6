"""Which instructions a program has, and in which order: an activation runs where its result is read."""

from __future__ import annotations

from collections import Counter

from ..serialization import ir
from ..serialization.table import CHAIN_FIELDS
from .emitter import Emitted
from .liveness import drop_dead, operands, results
from .program import ProgramBuilder
from .slots import Space

_ACTIVATIONS = (ir.SiluNode, ir.SigmoidNode, ir.TanhNode)
_BINARY = (ir.AddNode, ir.SubtractNode, ir.MultiplyNode, ir.MaximumNode)


def arrange(builder: ProgramBuilder) -> None:
    """Remove dead instructions from the chains of `builder`, whose `build` has run, and order the others."""
    drop_dead(builder)
    delay_activations(builder)


def delay_activations(builder: ProgramBuilder) -> None:
    """Move activations next to the binary operations that read their results.

    A gated layer, `silu(gate(x)) * up(x)`, computes the product `up(x)` after the activation. On a CPU, the runtime
    computes consecutive elementwise instructions together, without arrays for the values between them.
    """
    reads = Counter(s for chain in builder.chains for e in chain for s in set(operands(e)))
    reads.update(builder.interface.outputs)
    fixed = {id(e) for r in builder.replacements for e in r.emitted}
    for chain in builder.chains:
        for i in range(len(chain) - 2, -1, -1):
            activation = chain[i]
            if activation.op not in _ACTIVATIONS or id(activation) in fixed or reads[activation.fields["out"]] != 1:
                continue
            reader = _reader(chain, i)
            if reader is not None and chain[reader].op in _BINARY and id(chain[reader]) not in fixed:
                chain.insert(reader - 1, chain.pop(i))


def _reader(chain: list[Emitted], first: int) -> int | None:
    """Return the index of the instruction that reads the result of `chain[first]`.

    Returns None if an instruction between the two may change the operand of `chain[first]`.
    """
    x, out = (chain[first].fields[name] for name in ("x", "out"))
    for i in range(first + 1, len(chain)):
        emitted = chain[i]
        if out in operands(emitted):
            return i
        if x.space == Space.BUFFER or x in results(emitted) or any(name in emitted.fields for name in CHAIN_FIELDS):
            return None
    return None
