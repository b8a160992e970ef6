"""What the generated classes of ir.py are made of.

A table's class body is its schema: `FIELDS` is derived from the annotations, so
that every field is written down once and an IDE knows it.
"""

import inspect
from typing import Any, ClassVar, NamedTuple

# The schema's scalar types, as annotations. `bool` and `float` (32 bits) are
# called the same in Python.
int8 = int16 = int32 = int64 = uint8 = uint16 = uint32 = uint64 = int
double = float
string = str


class Field(NamedTuple):
    """One field of a table on the wire.

    `type` is the schema's spelling: "Tid", "[IntOrVid]", "int32", "string".
    `default` is None for a required field and for one that may be absent.
    """

    name: str
    id: int
    type: str
    default: Any
    required: bool


def _fields(cls: type, annotations: dict[str, str]):
    next_id = 0
    for name, text in annotations.items():
        type_ = text.removesuffix(" | None")
        if type_.startswith("list["):
            type_ = type_.removeprefix("list")
        if type_ == "Op":
            type_ = "OpNode"
            next_id += 1  # a union takes two ids: that of its tag, then its own
        yield Field(name, next_id, type_, getattr(cls, name, None), not hasattr(cls, name))
        next_id += 1


class Table:
    """A FlatBuffers table."""

    FIELDS: ClassVar[tuple[Field, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        annotations = inspect.get_annotations(cls)
        if annotations:  # an op has none of its own
            cls.FIELDS = tuple(_fields(cls, annotations))


class Op:
    """A member of the union OpNode, beside the table that it has on the wire."""

    OP_TYPE: ClassVar[int]
    NAME: ClassVar[str]
    FIELDS: ClassVar[tuple[Field, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.NAME = cls.__name__
