"""Reads MLX programs from FlatBuffers, for inspection and tests. The counterpart of pack.py.

Fields that a later schema appended are skipped. Any other mismatch with the schema
raises ValueError. The message starts with the path of the value in the program.

Reading takes time and memory in proportion to the size of the bytes, also for a hostile
file, which can store a table once and refer to it many times.
"""

import struct
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from . import ir
from .pack import DATA_ALIGNMENT, HEADER, MAGIC, prepend_path

MAX_EXPANSION = 8
"""How many times larger than its bytes a program may be. A FlatBuffer can store a value once and refer to it many
times. What real writers share is small."""


def read_payload(payload: bytes) -> ir.MLXGraph:
    """Return the MLX program in a delegate payload. Raises ValueError if the payload is damaged."""
    if len(payload) < HEADER.size:
        raise ValueError(f"payload: got {len(payload)} bytes, expected a header of {HEADER.size}")
    magic, data_offset, data_size = HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise ValueError(f"payload: got magic {magic!r}, expected {MAGIC!r}")
    # As in the runtime: without data, the fields may be 0 and the padding before the data may be missing.
    end = data_offset or len(payload)
    padding = 0 if data_size else DATA_ALIGNMENT - 1
    if not HEADER.size <= end <= end + data_size <= len(payload) + padding:
        raise ValueError(
            f"payload: the data segment of {data_size} bytes at offset {data_offset} is outside"
            f" [{HEADER.size}, {len(payload)}]"
        )
    return read(payload[HEADER.size : end])


def read(program: bytes) -> ir.MLXGraph:
    """Return the MLX program in a FlatBuffer. Raises ValueError if the FlatBuffer is damaged."""
    try:
        return _table_decoder(ir.MLXGraph).read(Buffer(program), 0)
    except ValueError as error:
        prepend_path("MLXGraph", error)
        raise


class Buffer:
    """The bytes of a FlatBuffer, with checked access. All offsets count from the start of the bytes."""

    def __init__(self, data: bytes):
        self.data = data
        self.room = MAX_EXPANSION * len(data)  # bytes that can still be read, counting repetitions

    def spend(self, size: int) -> None:
        """Count bytes that become values of the program."""
        self.room -= size
        if self.room < 0:
            raise ValueError(f": the program is more than {MAX_EXPANSION} times larger than its {len(self.data)} bytes")

    def get(self, format: struct.Struct, offset: int) -> Any:
        self.check(offset, format.size)
        return format.unpack_from(self.data, offset)[0]

    def check(self, offset: int, size: int) -> None:
        if not 0 <= offset <= len(self.data) - size:
            raise ValueError(f": {size} bytes at offset {offset} are outside the buffer of {len(self.data)} bytes")

    def follow(self, offset: int) -> int:
        """Return the absolute offset to which the relative offset stored at `offset` points."""
        return offset + self.get(U32, offset)


U16, U32, I32, U8 = (struct.Struct(f"<{code}") for code in "HIiB")


class Decoder(NamedTuple):
    """How the values of one schema type are read.

    `read` gets the offset of the value or, if it is not stored inline, of the
    reference to it. `size` is the number of bytes at that offset.
    """

    size: int
    read: Callable[[Buffer, int], Any]


def _scalar(code: str) -> Decoder:
    format = struct.Struct(f"<{code}")
    return Decoder(format.size, lambda buffer, offset: buffer.get(format, offset))


def _slot(cls: type) -> Decoder:
    return Decoder(4, lambda buffer, offset: cls(buffer.get(U32, offset)))


def _enum(cls: type[IntEnum]) -> Decoder:
    byte = _scalar("b")

    def read(buffer, offset):
        value = byte.read(buffer, offset)
        try:
            return cls(value)
        except ValueError:
            raise ValueError(f": {value} is not a {cls.__name__}") from None

    return Decoder(1, read)


def _string(buffer: Buffer, offset: int) -> str:
    start = buffer.follow(offset)
    length = buffer.get(U32, start)
    buffer.check(start + 4, length)
    buffer.spend(4 + length)
    try:
        return buffer.data[start + 4 : start + 4 + length].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f": invalid UTF-8: {error.reason}") from None


def _vector(element: Decoder) -> Decoder:
    def read(buffer, offset):
        start = buffer.follow(offset)
        length = buffer.get(U32, start)
        buffer.check(start + 4, length * element.size)
        buffer.spend(4 + length * element.size)
        values = []
        for i in range(length):
            try:
                values.append(element.read(buffer, start + 4 + i * element.size))
            except ValueError as error:
                prepend_path(f"[{i}]", error)
                raise
        return values

    return Decoder(4, read)


class Table(NamedTuple):
    """A table in the buffer, with the offsets of its fields."""

    buffer: Buffer
    start: int
    vtable: int
    vtable_size: int

    @classmethod
    def at(cls, buffer: Buffer, start: int) -> "Table":
        vtable = start - buffer.get(I32, start)
        size = buffer.get(U16, vtable)
        buffer.check(vtable, max(size, 4))
        buffer.spend(4)
        return cls(buffer, start, vtable, size)

    def field(self, id: int) -> int:
        """Return the offset of field `id`, or 0 if the field is absent."""
        entry = 4 + 2 * id
        offset = self.buffer.get(U16, self.vtable + entry) if entry < self.vtable_size else 0
        return self.start + offset if offset else 0


@cache
def _table_decoder(cls: type[ir.Table]) -> Decoder:
    fields = [(f, _decoder(f.type)) for f in cls.FIELDS]

    def read(buffer, offset):
        table = Table.at(buffer, buffer.follow(offset))
        values = {}
        for f, decoder in fields:
            try:
                field_offset = table.field(f.id)
                if not field_offset:
                    if f.required:
                        raise ValueError(": is required")
                    continue
                if f.type == "OpNode":
                    decoder = _op(buffer, table.field(f.id - 1))
                values[f.name] = decoder.read(buffer, field_offset)
            except ValueError as error:
                prepend_path(f".{f.name}", error)
                raise
        return cls(**values)

    return Decoder(4, read)


def _op(buffer: Buffer, tag_offset: int) -> Decoder:
    tag = buffer.get(U8, tag_offset) if tag_offset else 0
    if tag not in ir.OPS:
        raise ValueError(f": unknown op {tag}")
    cls = ir.OPS[tag]

    def read(buffer, offset):
        try:
            return _table_decoder(cls).read(buffer, offset)
        except ValueError as error:
            prepend_path(f"({cls.NAME})", error)
            raise

    return Decoder(4, read)


INLINE: dict[str, Decoder] = {
    **{f"int{8 * size}": _scalar(code) for size, code in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))},
    **{f"uint{8 * size}": _scalar(code) for size, code in ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))},
    "float": _scalar("f"),
    "double": _scalar("d"),
    "bool": _scalar("?"),
    "SlotType": _enum(ir.SlotType),
    "Tid": _slot(ir.Tid),
    "Vid": _slot(ir.Vid),
}


@cache
def _decoder(type_: str) -> Decoder | None:
    if type_ in INLINE:
        return INLINE[type_]
    if type_ == "string":
        return Decoder(4, _string)
    if type_ == "OpNode":
        return None  # depends on the tag; see _op
    if type_.startswith("["):
        return _vector(_decoder(type_.strip("[]")))
    return _table_decoder(getattr(ir, type_))
