"""The base classes of the generated module ir.py.

The class body of a table is its schema: `FIELDS` is derived from the annotations.
"""

import inspect
import re
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

# The schema's scalar types, for annotations. `bool` and `float` (32 bits) have the
# same name in Python.
int8 = int16 = int32 = int64 = uint8 = uint16 = uint32 = uint64 = int
double = float
string = str

# Marks of the fields that an instruction writes, for annotations: `out: Output[Tid]`.
T = TypeVar("T")
Output = Annotated[T, "output"]
InOut = Annotated[T, "inout"]


class Field(NamedTuple):
    """One field of a table on the wire.

    `type` is written as in the schema: "Tid", "[IntOrVid]", "int32", "string".
    `default` is None for a required field and for an optional field without a default.
    `output` is True if an instruction writes the slots in this field, `inout` if it
    also reads them.
    """

    name: str
    id: int
    type: str
    default: Any
    required: bool
    output: bool = False
    inout: bool = False


def _fields(cls: type, annotations: dict[str, str]):
    next_id = 0
    for name, annotation in annotations.items():
        mark, type_ = re.fullmatch(r"(?:(Output|InOut)\[)?(.*?)(?(1)\])", annotation).groups()
        type_ = type_.removesuffix(" | None")
        if type_.startswith("list["):
            type_ = type_.removeprefix("list")
        if type_ == "Op":
            type_ = "OpNode"
            next_id += 1  # a union has two ids: its tag has the first
        required = not hasattr(cls, name)
        yield Field(name, next_id, type_, getattr(cls, name, None), required, mark is not None, mark == "InOut")
        next_id += 1


class Table:
    """A FlatBuffers table."""

    FIELDS: ClassVar[tuple[Field, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        annotations = inspect.get_annotations(cls)
        if annotations:  # an op inherits the FIELDS of its table
            cls.FIELDS = tuple(_fields(cls, annotations))


class Op:
    """A member of the union OpNode. An op also inherits from the table that holds its fields."""

    OP_TYPE: ClassVar[int]
    NAME: ClassVar[str]
    TABLE: ClassVar[type[Table]]
    FIELDS: ClassVar[tuple[Field, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.NAME = cls.__name__
        cls.TABLE = cls.__bases__[0]
