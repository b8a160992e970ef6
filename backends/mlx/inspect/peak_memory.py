"""Estimates the memory that the temporaries of an MLX program take in a call."""

from __future__ import annotations

from dataclasses import dataclass

from ..serialization import ir
from ..serialization.infer_types import infer_types
from ..serialization.listing import ListedInstruction, tensor_ids
from ..serialization.type_rules import VIEWS


@dataclass(frozen=True)
class Peak:
    """The largest total size of the temporaries that exist at one time.

    `nbytes` is that size in bytes. `unknown` is the number of results that are left out, because their size is unknown
    before a call. `at` is the instruction that runs at that time, or None if the program has no temporaries.
    """

    nbytes: int
    unknown: int
    at: ListedInstruction | None


@dataclass
class _Block:
    """The memory of a result: its size, and the indices of the first and the last instruction that use it."""

    nbytes: int
    first: int
    last: int


def peak_of_temporaries(graph: ir.MLXGraph) -> Peak:
    """Estimate the peak memory of the temporaries in one call.

    The estimate assumes that each result has memory of its own, except a view, which shares the memory of its operand.
    The memory is allocated and freed in program order. Dynamic extents are at their upper bounds. MLX often takes less
    memory, because it evaluates lazily, fuses operations and reuses the memory of operands.
    """
    instructions = infer_types(graph, upper_bound=True)
    position = {id(typed): i for i, typed in enumerate(instructions)}
    temporaries = tensor_ids(graph)["temporary"]
    block_of: dict[int, _Block] = {}  # temporary -> the block that holds it
    blocks: list[_Block] = []
    unknown = 0
    for i, typed in enumerate(instructions):
        end = max(i, position[id(typed.outer_scan)]) if typed.outer_scan else i
        read = [block_of[tid] for tid in typed.operands if tid in block_of]
        for block in read:
            block.last = max(block.last, end)
        is_view = type(typed.instruction.node) in VIEWS
        for tid, type_ in typed.results.items():
            if tid not in temporaries:
                continue
            if not is_view:
                unknown += type_.nbytes is None
                block_of[tid] = _Block(type_.nbytes or 0, first=i, last=end)
                blocks.append(block_of[tid])
            elif read:
                block_of[tid] = read[0]
            else:
                block_of.pop(tid, None)  # a view of a constant, an input or a buffer
    return _peak(blocks, unknown, [typed.instruction for typed in instructions])


def _peak(blocks: list[_Block], unknown: int, instructions: list[ListedInstruction]) -> Peak:
    change = [0] * (len(instructions) + 1)
    for block in blocks:
        change[block.first] += block.nbytes
        change[block.last + 1] -= block.nbytes
    peak, at, now = 0, None, 0
    for i, instruction in enumerate(instructions):
        now += change[i]
        if now > peak:
            peak, at = now, instruction
    return Peak(peak, unknown, at)
