"""The base classes of the generated module ir.py.

The annotations in the class body of a table are the schema of the table. `FIELDS` is derived from them.
"""

import inspect
import re
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

# The scalar types of the schema, for annotations. `bool`, and `float` for 32 bits, need no definition here: they have
# the same names in Python.
int8 = int
int16 = int
int32 = int
int64 = int
uint8 = int
uint16 = int
uint32 = int
uint64 = int
double = float
string = str

# Annotations that mark the fields that an instruction writes, as in `out: Output[Tid]`. An instruction also reads the
# slots of an `InOut` field.
T = TypeVar("T")
Output = Annotated[T, "output"]
InOut = Annotated[T, "inout"]

# The fields of control instructions that name a chain by its index.
CHAIN_FIELDS = ("then_chain_idx", "else_chain_idx", "cond_chain_idx", "body_chain_idx")


class Field(NamedTuple):
    """One field of a table.

    `id` is the FlatBuffers id of the field. `type` is written as in the schema: "Tid",
    "[IntOrVid]", "int32", "string". `default` is None for a required field, and for an optional
    field without a default. `output` says whether an instruction writes the slots in this field,
    and `inout` whether an instruction both reads and writes them.
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
            next_id += 1  # a union has two ids: the first is that of its tag, the second that of its value
        required = not hasattr(cls, name)
        yield Field(name, next_id, type_, getattr(cls, name, None), required, mark is not None, mark == "InOut")
        next_id += 1


class Table:
    """A FlatBuffers table."""

    FIELDS: ClassVar[tuple[Field, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        annotations = inspect.get_annotations(cls)
        if annotations:  # the class of an IR node, see Op, has none: it inherits FIELDS from its table
            cls.FIELDS = tuple(_fields(cls, annotations))


class Op:
    """The base class of the IR nodes, the members of the union OpNode.

    The class of an IR node also inherits from the table that has the node's fields, `TABLE`.
    `OP_TYPE` is the tag of the node in the union.
    """

    OP_TYPE: ClassVar[int]
    NAME: ClassVar[str]
    TABLE: ClassVar[type[Table]]
    FIELDS: ClassVar[tuple[Field, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.NAME = cls.__name__
        cls.TABLE = cls.__bases__[0]
