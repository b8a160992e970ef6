"""Which instructions a program has, in which order, and how long each temporary lives."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..serialization import ir
from ..serialization.table import CHAIN_FIELDS
from .emitter import Emitted, Replacement
from .program import ProgramBuilder
from .slots import Slot, Space, TensorSlot

_LOOPS = (ir.ScanNode, ir.WhileNode)
_CONTROL = (ir.IfNode, *_LOOPS)  # control instructions: they run other chains
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


def drop_dead(builder: ProgramBuilder) -> None:
    """Remove dead instructions from the chains of `builder`: those that write only slots that nothing reads.

    Instructions that write a buffer or an output, and control instructions, are never dead. A replacement is removed
    when the instructions that are left do not compute all of its results.
    """
    outputs: set[Slot] = set(builder.interface.outputs)
    sizes = None
    # If an instruction is removed, the instructions that compute its operands may become dead. The loop therefore
    # repeats until no instruction is removed.
    while sizes != (sizes := [len(chain) for chain in builder.chains]):
        builder.replacements = [r for r in builder.replacements if _has_results(builder, r)]
        read = {s for chain in builder.chains for e in chain for s in operands(e)}
        read |= {s for r in builder.replacements for s in operands(r.extension)}
        needed = read | outputs
        for chain in builder.chains:
            chain[:] = [e for e in chain if not _is_dead(e, needed)]


def _has_results(builder: ProgramBuilder, replacement: Replacement) -> bool:
    """Whether the instructions that are to be replaced compute all results of the extension."""
    replaced = {id(e) for e in replacement.emitted}
    left = [e for e in replacement.chain if id(e) in replaced]
    return set(results(replacement.extension)) <= {s for e in _with_inner(builder, left) for s in results(e)}


def _with_inner(builder: ProgramBuilder, chain: list[Emitted]) -> Iterator[Emitted]:
    """Yield the instructions of `chain`, and those of the chains that they run."""
    for emitted in chain:
        yield emitted
        for name in CHAIN_FIELDS:
            if name in emitted.fields:
                yield from _with_inner(builder, builder.chains[emitted.fields[name]])


def operands(emitted: Emitted) -> Iterator[Slot]:
    """Yield the slots that an instruction reads.

    The results of a control instruction count as read, because the chains that it runs write them.
    """
    is_control = issubclass(emitted.op, _CONTROL)
    for f in emitted.op.FIELDS:
        if is_control or f.inout or not f.output:
            yield from slots_in(emitted.fields.get(f.name))


def results(emitted: Emitted) -> Iterator[Slot]:
    """Yield the slots that an instruction writes."""
    for f in emitted.op.FIELDS:
        if f.output:
            yield from slots_in(emitted.fields.get(f.name))


def slots_in(value: Any) -> Iterator[Slot]:
    """Yield the slots in `value`, the value of a field: a slot, a list, or anything else."""
    for v in value if isinstance(value, list) else [value]:
        if isinstance(v, Slot):
            yield v


def _is_dead(emitted: Emitted, needed: set[Slot]) -> bool:
    if issubclass(emitted.op, _CONTROL):
        return False
    written = list(results(emitted))
    return bool(written) and all(
        s not in needed and not (isinstance(s, TensorSlot) and s.space != Space.TEMP) for s in written
    )


def lifetimes(builder: ProgramBuilder) -> dict[TensorSlot, tuple[int, int]]:
    """Return, for each temporary, the numbers of the first and the last instruction that use it.

    Instructions are numbered in the order of the main chain. The chains that a control instruction runs are numbered
    just before that instruction. A call runs some of the instructions in this order, except that a loop repeats its
    chains. Each temporary that a loop or its chains use therefore lives from the start of the loop to its end.
    """
    lives: dict[TensorSlot, tuple[int, int]] = {}
    now = 0

    def visit(chain: list[Emitted]) -> dict[TensorSlot, None]:
        """Record the uses in `chain`. Returns the temporaries that the chain uses, as keys in a fixed order."""
        nonlocal now
        used: dict[TensorSlot, None] = {}
        for emitted in chain:
            start, inner = now, {}
            for name in CHAIN_FIELDS:
                if name in emitted.fields:
                    inner |= visit(builder.chains[emitted.fields[name]])
            slots = (s for value in emitted.fields.values() for s in slots_in(value))
            own = {s: None for s in slots if _is_temporary(s)}
            is_loop = issubclass(emitted.op, _LOOPS)
            for slot in own | inner if is_loop else own:
                first, last = lives.get(slot, (now, now))  # type: ignore[arg-type]
                lives[slot] = min(first, start if is_loop else now), max(last, now)  # type: ignore[index]
            used |= own | inner
            now += 1
        return used

    visit(builder.chains[0])
    # An extension reads its operands and writes its results in place of several instructions. These instructions may
    # read an operand for the last time before they write the result, but no two slots of the extension may share
    # memory.
    for replacement in builder.replacements:
        slots = [s for value in replacement.extension.fields.values() for s in slots_in(value) if s in lives]
        last = max((lives[s][0] for s in slots), default=0)
        lives |= {s: (lives[s][0], max(lives[s][1], last)) for s in slots}
    return lives


def _is_temporary(slot: Slot) -> bool:
    return isinstance(slot, TensorSlot) and slot.space == Space.TEMP


def recycle(lives: dict[TensorSlot, tuple[int, int]]) -> dict[TensorSlot, int]:
    """Return a number for each temporary. Temporaries whose lifetimes are disjoint may get the same number.

    A result never has the number of an operand of the same instruction, for two reasons. An instruction may write one
    result before it reads all operands. And the runtime overwrites the operand `dst` of an update instruction if `out`
    is the same slot.
    """
    numbers: dict[TensorSlot, int] = {}
    free: list[int] = []
    live: list[tuple[int, int]] = []  # (last, number)
    for slot, (first, last) in sorted(lives.items(), key=lambda item: item[1][0]):
        while live and live[0][0] < first:
            heapq.heappush(free, heapq.heappop(live)[1])
        numbers[slot] = heapq.heappop(free) if free else len(live)
        heapq.heappush(live, (last, numbers[slot]))
    return numbers
