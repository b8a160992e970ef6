"""Reads a program back, for inspection and for tests; the mirror of pack.py.

Fields that a later schema appended are skipped. Everything else that does not fit
the schema raises ValueError with its place in the program.
"""

import struct
from enum import IntEnum
from functools import cache
from typing import Any, Callable, NamedTuple

from . import ir
from .pack import HEADER, MAGIC, inside


def read_payload(payload: bytes) -> ir.MLXGraph:
    """The program in a delegate payload."""
    if len(payload) < HEADER.size:
        raise ValueError(f"payload: got {len(payload)} bytes, expected a header of {HEADER.size}")
    magic, data_offset, data_size = HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise ValueError(f"payload: magic is {magic!r}, expected {MAGIC!r}")
    if not HEADER.size <= data_offset <= data_offset + data_size <= len(payload):
        raise ValueError(
            f"payload: data of {data_size} bytes at {data_offset} is outside"
            f" [{HEADER.size}, {len(payload)}]"
        )
    return read(payload[HEADER.size : data_offset])


def read(program: bytes) -> ir.MLXGraph:
    """The program in a FlatBuffer."""
    try:
        return _table(ir.MLXGraph).read(Reader(program), 0)
    except ValueError as error:
        raise inside("MLXGraph", error)


class Reader:
    def __init__(self, data: bytes):
        self.data = data

    def get(self, format: struct.Struct, at: int) -> Any:
        self.check(at, format.size)
        return format.unpack_from(self.data, at)[0]

    def check(self, at: int, size: int) -> None:
        if not 0 <= at <= len(self.data) - size:
            raise ValueError(f": {size} bytes at {at} are outside the {len(self.data)} that came")

    def follow(self, at: int) -> int:
        """The place that the offset at `at` points to."""
        return at + self.get(U32, at)


U16, U32, I32, U8 = (struct.Struct(f"<{code}") for code in "HIiB")


class Kind(NamedTuple):
    """How the values of one schema type are read: from `at`, where the value or,
    if it is not inline, the offset to it lies."""

    size: int
    read: Callable[[Reader, int], Any]


def _scalar(code: str) -> Kind:
    format = struct.Struct(f"<{code}")
    return Kind(format.size, lambda reader, at: reader.get(format, at))


def _slot(cls: type) -> Kind:
    return Kind(4, lambda reader, at: cls(reader.get(U32, at)))


def _enum(cls: type[IntEnum]) -> Kind:
    byte = _scalar("b")

    def read(reader, at):
        value = byte.read(reader, at)
        try:
            return cls(value)
        except ValueError:
            raise ValueError(f": {value} is not a {cls.__name__}") from None

    return Kind(1, read)


def _string(reader: Reader, at: int) -> str:
    start = reader.follow(at)
    length = reader.get(U32, start)
    reader.check(start + 4, length)
    try:
        return reader.data[start + 4 : start + 4 + length].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f": not UTF-8: {error.reason}") from None


def _vector(element: Kind) -> Kind:
    def read(reader, at):
        start = reader.follow(at)
        length = reader.get(U32, start)
        reader.check(start + 4, length * element.size)
        values = []
        for i in range(length):
            try:
                values.append(element.read(reader, start + 4 + i * element.size))
            except ValueError as error:
                raise inside(f"[{i}]", error)
        return values

    return Kind(4, read)


class Table(NamedTuple):
    """Where the fields of a table in the buffer are."""

    reader: Reader
    start: int
    vtable: int
    vtable_size: int

    @classmethod
    def at(cls, reader: Reader, start: int) -> "Table":
        vtable = start - reader.get(I32, start)
        size = reader.get(U16, vtable)
        reader.check(vtable, max(size, 4))
        return cls(reader, start, vtable, size)

    def field(self, id: int) -> int:
        """Where field `id` is; 0 if it is absent."""
        entry = 4 + 2 * id
        offset = self.reader.get(U16, self.vtable + entry) if entry < self.vtable_size else 0
        return self.start + offset if offset else 0


@cache
def _table(cls: type[ir.Table]) -> Kind:
    columns = [(f, _kind(f.type)) for f in cls.FIELDS]

    def read(reader, at):
        table = Table.at(reader, reader.follow(at))
        values = {}
        for f, kind in columns:
            try:
                place = table.field(f.id)
                if not place:
                    if f.required:
                        raise ValueError(": is required")
                    continue
                if f.type == "OpNode":
                    kind = _op(reader, table.field(f.id - 1))
                values[f.name] = kind.read(reader, place)
            except ValueError as error:
                raise inside(f".{f.name}", error)
        return cls(**values)

    return Kind(4, read)


def _op(reader: Reader, tag_at: int) -> Kind:
    tag = reader.get(U8, tag_at) if tag_at else 0
    if tag not in ir.OPS:
        raise ValueError(f": unknown op {tag}")
    cls = ir.OPS[tag]

    def read(reader, at):
        try:
            return _table(cls).read(reader, at)
        except ValueError as error:
            raise inside(f"({cls.NAME})", error)

    return Kind(4, read)


INLINE: dict[str, Kind] = {
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
def _kind(type_: str) -> Kind | None:
    if type_ in INLINE:
        return INLINE[type_]
    if type_ == "string":
        return Kind(4, _string)
    if type_ == "OpNode":
        return None  # its tag decides
    if type_.startswith("["):
        return _vector(_kind(type_.strip("[]")))
    return _table(getattr(ir, type_))
