"""Writes MLX programs as FlatBuffers.

One writer serves every table, because it follows the table's `FIELDS`. Equal strings and
equal operands are written once and shared.

A value that the schema does not allow raises TypeError or ValueError. The message
starts with the path of the value in the program:

    MLXGraph.instruction_chains[0].instructions[3].op(SumNode).axes[1]: 2147483648
    is outside int32 [-2147483648, 2147483647]
"""

import math
import struct
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from flatbuffers import Builder

from . import ir

# A payload is this header, the FlatBuffer, and zeros up to a multiple of
# DATA_ALIGNMENT. The header ends with the offset and the size of a data segment. The
# segment is empty, because the constants are in ExecuTorch's named data.
HEADER = struct.Struct("<4x4sQQ")
MAGIC = b"MLX0"
DATA_ALIGNMENT = 16


def pack_payload(graph: ir.MLXGraph) -> bytes:
    """Return the delegate payload of an MLX program: header and FlatBuffer."""
    program = pack(graph)
    end = HEADER.size + len(program)
    data_offset = -(-end // DATA_ALIGNMENT) * DATA_ALIGNMENT
    return HEADER.pack(MAGIC, data_offset, 0) + program + bytes(data_offset - end)


def pack(graph: ir.MLXGraph) -> bytes:
    """Return the FlatBuffer of an MLX program. Raises TypeError or ValueError if the schema does not allow it."""
    packer = Packer()
    try:
        root = _table_encoder(ir.MLXGraph).prepare(packer, graph)
    except (TypeError, ValueError) as error:
        prepend_path("MLXGraph", error)
        raise
    packer.builder.Finish(root)
    return bytes(packer.builder.Output())


class Packer:
    """The state while one program is written. `shared` maps the content of a value to the offset of its copy."""

    def __init__(self):
        self.builder = Builder(1 << 16)
        self.shared: dict[Any, int] = {}


class Encoder(NamedTuple):
    """How the values of one schema type are written.

    `prepare` checks a value. If the type is stored inline, `prepare` returns the value.
    Otherwise it writes the value to the buffer and returns the offset of the written value.
    `prepend` puts the result of `prepare` into the table or vector that is being built.
    `size` is the size of this result in bytes.
    """

    size: int
    prepare: Callable[[Packer, Any], Any]
    prepend: Callable[[Builder, Any], None]


def prepend_path(part: str, error: Exception) -> None:
    """Put `part`, the outer part of a path, in front of the message of `error`."""
    error.args = (f"{part}{error}",)


def _wrong_type(value: Any, expected: str) -> TypeError:
    return TypeError(f": got {value!r} of type {type(value).__name__}, expected {expected}")


# ---------------------------------------------------------------------------
# Scalars and slots: stored inline
# ---------------------------------------------------------------------------


def _int(type_: str) -> Encoder:
    bits = int(type_.lstrip("uint"))
    low, high = (0, 2**bits - 1) if type_[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    def prepare(_, value):
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong_type(value, type_)
        if not low <= value <= high:
            raise ValueError(f": {value} is outside {type_} [{low}, {high}]")
        return value

    return Encoder(bits // 8, prepare, getattr(Builder, f"Prepend{type_.capitalize()}"))


def _float(type_: str) -> Encoder:
    code, size, prepend = {"float": ("<f", 4, Builder.PrependFloat32), "double": ("<d", 8, Builder.PrependFloat64)}[
        type_
    ]

    def prepare(_, value):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise _wrong_type(value, type_)
        try:
            struct.pack(code, value)  # little-endian formats check the range, native ones do not
        except OverflowError:
            raise ValueError(f": {value} is outside {type_}") from None
        return float(value)

    return Encoder(size, prepare, prepend)


def _bool() -> Encoder:
    def prepare(_, value):
        if not isinstance(value, bool):
            raise _wrong_type(value, "bool")
        return value

    return Encoder(1, prepare, Builder.PrependBool)


def _enum(cls: type[IntEnum]) -> Encoder:
    def prepare(_, value):
        if not isinstance(value, cls):
            raise _wrong_type(value, cls.__name__)
        return value

    return Encoder(1, prepare, Builder.PrependInt8)


def _slot(cls: type) -> Encoder:
    index = _int("uint32")

    def prepare(packer, value):
        if type(value) is not cls:
            raise _wrong_type(value, cls.__name__)
        return index.prepare(packer, value.idx)

    return Encoder(4, prepare, index.prepend)


# ---------------------------------------------------------------------------
# References: stored as an offset
# ---------------------------------------------------------------------------


def _reference(prepare: Callable[[Packer, Any], int]) -> Encoder:
    return Encoder(4, prepare, Builder.PrependUOffsetTRelative)


def _string() -> Encoder:
    def prepare(packer, value):
        if not isinstance(value, str):
            raise _wrong_type(value, "string")
        if value not in packer.shared:
            try:
                packer.shared[value] = packer.builder.CreateString(value)
            except UnicodeEncodeError as error:  # a lone surrogate
                raise ValueError(f": {value!r} is not valid Unicode: {error.reason}") from None
        return packer.shared[value]

    return _reference(prepare)


def _vector(element: Encoder, type_: str) -> Encoder:
    def prepare(packer, values):
        if not isinstance(values, (list, tuple)):
            raise _wrong_type(values, type_)
        prepared = []
        for i, value in enumerate(values):
            try:
                prepared.append(element.prepare(packer, value))
            except (TypeError, ValueError) as error:
                prepend_path(f"[{i}]", error)
                raise
        builder = packer.builder
        builder.StartVector(element.size, len(prepared), element.size)
        for value in reversed(prepared):
            element.prepend(builder, value)
        return builder.EndVector()

    return _reference(prepare)


class FieldEncoder(NamedTuple):
    """How one field of a table is written."""

    name: str
    id: int
    default: Any
    required: bool
    encoder: Encoder


def _field_encoders(cls: type[ir.Table]) -> list[FieldEncoder]:
    encoders = []
    for f in cls.FIELDS:
        if f.type == "OpNode":
            encoders.append(FieldEncoder(f.name, f.id - 1, None, f.required, _tag()))
        encoders.append(FieldEncoder(f.name, f.id, f.default, f.required, _encoder(f.type)))
    # The widest fields come first: the buffer is written from its end, and this order needs no padding.
    return sorted(encoders, key=lambda e: -e.encoder.size)


@cache
def _table_encoder(cls: type[ir.Table]) -> Encoder:
    fields = _field_encoders(cls)
    width = max((f.id for f in fields), default=-1) + 1
    # Tables for operands and dimensions are shared, because many are equal. Tables with floats are not shared, because
    # 0.0 and -0.0 are equal as keys.
    shareable = not issubclass(cls, ir.Op) and all(
        f.type in INLINE and f.type not in ("float", "double") for f in cls.FIELDS
    )

    def prepare(packer, value):
        if type(value) is not cls:
            raise _wrong_type(value, cls.__name__)
        present = []
        for name, id_, default, required, encoder in fields:
            item = getattr(value, name)
            try:
                if item is None and default is None:
                    if required:
                        raise ValueError(": is required")
                    continue
                item = encoder.prepare(packer, item)
            except (TypeError, ValueError) as error:
                prepend_path(f".{name}", error)
                raise
            if default is None or not _reads_as_default(item, default):
                present.append((id_, item, encoder.prepend))
        if not shareable:
            return write(packer.builder, present)
        key = (cls, *((id_, item) for id_, item, _ in present))
        if key not in packer.shared:
            packer.shared[key] = write(packer.builder, present)
        return packer.shared[key]

    def write(builder, present):
        builder.StartObject(width)
        for id_, item, prepend in present:
            prepend(builder, item)
            builder.Slot(id_)
        return builder.EndObject()

    return _reference(prepare)


def _reads_as_default(item: Any, default: Any) -> bool:
    """Whether `item` is exactly the default, including the sign of zero, so that the field need not be written."""
    return item == default and (item != 0 or math.copysign(1, item) == math.copysign(1, default))


def _op_class(value: Any) -> type[ir.Op]:
    if ir.OPS.get(getattr(value, "OP_TYPE", None)) is not type(value):
        raise _wrong_type(value, "an op")
    return type(value)


def _tag() -> Encoder:
    return _int("uint8")._replace(prepare=lambda _, value: _op_class(value).OP_TYPE)


def _op() -> Encoder:
    def prepare(packer, value):
        cls = _op_class(value)
        try:
            return _table_encoder(cls).prepare(packer, value)
        except (TypeError, ValueError) as error:
            prepend_path(f"({cls.NAME})", error)
            raise

    return _reference(prepare)


INLINE: dict[str, Encoder] = {
    **{type_: _int(type_) for type_ in ("int8", "int16", "int32", "int64")},
    **{type_: _int(type_) for type_ in ("uint8", "uint16", "uint32", "uint64")},
    "float": _float("float"),
    "double": _float("double"),
    "bool": _bool(),
    "SlotType": _enum(ir.SlotType),
    "Tid": _slot(ir.Tid),
    "Vid": _slot(ir.Vid),
}


@cache
def _encoder(type_: str) -> Encoder:
    if type_ in INLINE:
        return INLINE[type_]
    if type_ == "string":
        return _string()
    if type_ == "OpNode":
        return _op()
    if type_.startswith("["):
        return _vector(_encoder(type_.strip("[]")), type_)
    return _table_encoder(getattr(ir, type_))
