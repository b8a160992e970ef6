"""Finds the MLX programs in a .pte: the file's own tables say where they are.

The segments of a file can be larger than memory: only the payloads are read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..serialization import ir
from ..serialization.read import read_payload

if TYPE_CHECKING:
    from executorch.exir.schema import Program

BACKEND = "MLXBackend"
_IDENTIFIER = b"ET"  # ET12 in the files of today

# What ExecuTorch's deserializer, which takes its input to be sound, stumbles over.
_DAMAGE = (struct.error, ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, AssertionError)


class ProgramError(Exception):
    """A file that is not what it should be, in one sentence for the user."""


@dataclass(frozen=True)
class Delegate:
    """One MLX program of a file. `index` counts the MLX delegates of its method."""

    method: str
    index: int
    payload: bytes
    graph: ir.MLXGraph

    @property
    def name(self) -> str:
        return f"{self.method}.{self.index}"


@dataclass(frozen=True)
class Contents:
    """What a file holds. `named_data` is key → size in bytes; `others` counts the delegates of
    other backends, and the calls of kernels, by method."""

    size: int
    methods: list[str]
    delegates: list[Delegate]
    named_data: dict[str, int]
    others: dict[str, dict[str, int]]


def read_pte(path: str | Path) -> Contents:
    """The MLX programs of the .pte at `path`; ProgramError if it is none, or damaged."""
    size = Path(path).stat().st_size
    if size < 64:
        raise ProgramError(f"{path} is no .pte file: it has {size} bytes")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        identifier = data[4:8]
        if identifier[:2] != _IDENTIFIER or not identifier[2:].isdigit():
            raise ProgramError(f"{path} is no .pte file: bytes 4 to 8 are {identifier!r}, expected b'ET12'")
        return _read(path, data)


def _read(path: str | Path, data: mmap.mmap) -> Contents:
    # They bring torch along, which nobody should wait for who only asks for help.
    from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program
    from executorch.exir._serialize._program import _get_extended_header

    header = _get_extended_header(data[:64])
    program_size = header.program_size if header else len(data)
    if program_size > len(data):
        raise ProgramError(f"{path} is cut off: its program has {program_size} bytes, the file {len(data)}")
    try:
        program = _flatbuffer_to_program(data[:program_size])
    except _DAMAGE as error:
        raise ProgramError(f"{path} is damaged: its program cannot be read ({error})") from error
    base = header.segment_base_offset if header else 0
    for i, segment in enumerate(program.segments or ()):
        if base + segment.offset + segment.size > len(data):
            raise ProgramError(
                f"{path} is cut off: segment {i} ends at {base + segment.offset + segment.size},"
                f" the file at {len(data)}"
            )
    try:
        return Contents(
            size=len(data),
            methods=[plan.name for plan in program.execution_plan],
            delegates=list(_delegates(path, program, data, base)),
            named_data={n.key: program.segments[n.segment_index].size for n in program.named_data or ()},
            others={plan.name: _others(plan) for plan in program.execution_plan},
        )
    except (IndexError, UnicodeDecodeError) as error:
        raise ProgramError(f"{path} is damaged: {error}") from error


def _delegates(path, program: Program, data: mmap.mmap, base: int):
    from executorch.exir.schema import DataLocation

    for plan in program.execution_plan:
        ours = [delegate for delegate in plan.delegates if delegate.id == BACKEND]
        for index, delegate in enumerate(ours):
            where = delegate.processed
            if where.location == DataLocation.INLINE:
                payload = bytes(program.backend_delegate_data[where.index].data)
            else:
                segment = program.segments[where.index]
                payload = data[base + segment.offset : base + segment.offset + segment.size]
            try:
                graph = read_payload(payload)
            except ValueError as error:
                raise ProgramError(
                    f"{path} is damaged: the MLX program {index} of method {plan.name}: {error}"
                ) from error
            yield Delegate(plan.name, index, payload, graph)


def _others(plan) -> dict[str, int]:
    """What a method runs beside MLX: backend or operator → number of calls."""
    calls: dict[str, int] = {}
    for chain in plan.chains:
        for instruction in chain.instructions:
            arguments = instruction.instr_args
            if hasattr(arguments, "delegate_index"):
                name = plan.delegates[arguments.delegate_index].id
            elif hasattr(arguments, "op_index"):
                operator = plan.operators[arguments.op_index]
                name = f"{operator.name}.{operator.overload}" if operator.overload else operator.name
            else:
                continue
            if name != BACKEND:
                calls[name] = calls.get(name, 0) + 1
    return calls
