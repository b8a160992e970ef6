"""Finds the MLX programs in a .pte file.

The segments of a file can be larger than memory. Only the payloads of the MLX programs are therefore read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..serialization import ir
from ..serialization.limits import ProgramError, check_limits
from ..serialization.read import MAX_EXPANSION, read_payload

if TYPE_CHECKING:
    from executorch.exir.schema import Program

BACKEND = "MLXBackend"
_HEADER_SIZE = 64  # ExecuTorch's extended header lies within this many bytes at the beginning of a file
_IDENTIFIER = b"ET"  # followed by a version of two digits, currently 12

# ExecuTorch's deserializer does not validate its input. It raises one of these exceptions for a damaged file.
_DAMAGE_ERRORS = (
    struct.error,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    AssertionError,
)


@dataclass(frozen=True)
class Delegate:
    """One MLX program of a file. `index` is its number among the MLX programs of the method, from 0.

    `orders` has an entry for each input and then each output: the axes of a tensor as they lie in memory, outermost
    first, or None for a number.
    """

    method: str
    index: int
    payload: bytes
    graph: ir.MLXGraph
    orders: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True)
class Contents:
    """The contents of a file.

    `size` is the size of the file in bytes. `named_data` maps the key of each entry to the entry's size in bytes, and
    `named_data_offsets` maps it to the position of the entry's first byte in the file. `calls_outside_mlx` has, for
    each method, the number of calls of each other backend and each of ExecuTorch's own operators.
    """

    size: int
    methods: list[str]
    delegates: list[Delegate]
    named_data: dict[str, int]
    named_data_offsets: dict[str, int]
    calls_outside_mlx: dict[str, dict[str, int]]


def is_pte(path: Path) -> bool:
    """Whether a file begins as a program of ExecuTorch does."""
    with open(path, "rb") as file:
        return file.read(6)[4:] == _IDENTIFIER


def read_pte(path: str | Path) -> Contents:
    """Read the MLX programs of a .pte file. Raises ProgramError if the file is damaged or is not a .pte file."""
    size = Path(path).stat().st_size
    if size < _HEADER_SIZE:
        raise ProgramError(f"{path} is not a .pte file: got {size} bytes, expected at least {_HEADER_SIZE}")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_payloads(data, path)


def read_payloads(data: bytes | mmap.mmap, path: str | Path = "the program") -> Contents:
    """Read the MLX programs from `data`, the bytes of a .pte file. `path` is the name of the file in errors."""
    identifier = data[4:8]
    if identifier[:2] != _IDENTIFIER or not identifier[2:].isdigit():
        raise ProgramError(f"{path} is not a .pte file: got {identifier!r} at byte 4, expected b'ET12'")
    return _read(path, data)


def _read(path: str | Path, data: bytes | mmap.mmap) -> Contents:
    # Imported here, because these modules import torch, which would make `executorch-mlx --help` slow.
    from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program
    from executorch.exir._serialize._program import _get_extended_header

    header = _get_extended_header(data[:_HEADER_SIZE])
    program_size = header.program_size if header else len(data)
    if program_size > len(data):
        raise ProgramError(f"{path} is truncated: got {len(data)} bytes, expected a program of {program_size} bytes")
    try:
        program = _flatbuffer_to_program(data[:program_size])
    except _DAMAGE_ERRORS as error:
        raise ProgramError(f"{path} is damaged: its program cannot be read ({error})") from error
    base = header.segment_base_offset if header else 0
    for i, segment in enumerate(program.segments or ()):
        if base + segment.offset + segment.size > len(data):
            raise ProgramError(
                f"{path} is truncated: got {len(data)} bytes, but segment {i} ends at byte"
                f" {base + segment.offset + segment.size}"
            )
    try:
        return Contents(
            size=len(data),
            methods=[plan.name for plan in program.execution_plan],
            delegates=list(_delegates(path, program, data, base)),
            named_data={n.key: program.segments[n.segment_index].size for n in program.named_data or ()},
            named_data_offsets={
                n.key: base + program.segments[n.segment_index].offset for n in program.named_data or ()
            },
            calls_outside_mlx={plan.name: _calls_outside_mlx(plan) for plan in program.execution_plan},
        )
    except (IndexError, UnicodeDecodeError) as error:
        raise ProgramError(f"{path} is damaged: {error}") from error


def _delegates(path, program: Program, data: bytes | mmap.mmap, base: int):
    """Yield the MLX delegates. `base` is the offset of the first segment. Raises ProgramError for damaged payloads."""
    from executorch.exir.schema import DataLocation

    room = MAX_EXPANSION * len(data)  # delegates may share payloads
    for plan in program.execution_plan:
        mlx_delegates = [(i, delegate) for i, delegate in enumerate(plan.delegates) if delegate.id == BACKEND]
        for index, (number, delegate) in enumerate(mlx_delegates):
            location = delegate.processed
            if location.location == DataLocation.INLINE:
                payload = bytes(program.backend_delegate_data[location.index].data)
            else:
                segment = program.segments[location.index]
                payload = data[base + segment.offset : base + segment.offset + segment.size]
            room -= len(payload)
            if room < 0:
                raise ProgramError(
                    f"{path} is damaged: its payloads are more than {MAX_EXPANSION} times larger than the file"
                )
            try:
                graph = read_payload(payload)
                check_limits(graph)
            except ValueError as error:
                raise ProgramError(f"{path} is damaged: MLX program {index} of method {plan.name}: {error}") from error
            yield Delegate(plan.name, index, payload, graph, _orders(plan, number))


def _orders(plan, delegate: int) -> tuple[tuple[int, ...] | None, ...]:
    """Return the orders of the arguments of the first call of a delegate. `delegate` is its number in the method."""
    for chain in plan.chains or ():
        for instruction in chain.instructions or ():
            if getattr(instruction.instr_args, "delegate_index", None) == delegate:
                values = [plan.values[i].val for i in instruction.instr_args.args or ()]
                orders = (getattr(value, "dim_order", None) for value in values)
                return tuple(None if order is None else tuple(order) for order in orders)
    return ()


def _calls_outside_mlx(plan) -> dict[str, int]:
    """Return the number of calls of each backend other than MLX and of each operator that is not delegated."""
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
