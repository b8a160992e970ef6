#!/usr/bin/env python3
"""Generates ir.py and output_fields.h from schema.fbs.

    python backends/mlx/serialization/generate.py [--check] [--flatc PATH | --no-flatc]

ir.py is a build product: setup.py and the C++ build write it. It has the IR as Python
dataclasses: one class per table and one line per IR node.
pack.py and read.py derive from the fields of these classes how to write and read them.
`flatc --python` would instead write one untyped module per table, several thousand
lines in all.

output_fields.h tells the C++ runtime which fields an instruction writes.

flatc checks that the schema is legal, also in the C++ build. The parser below reads only
the part of the schema language that schema.fbs uses, and raises SchemaError for anything
else. This script imports only the standard library, so that it can run before anything is built
or installed.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCHEMA = HERE / "schema.fbs"
IR = HERE / "ir.py"
OUTPUT_FIELDS = HERE / "output_fields.h"

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SCALARS = (*INTS, "float", "double", "bool")
UNION = "OpNode"
FIRST_EXTENSION = 200  # see schema.fbs
MARKS = {"": "", "output": "Output", "inout": "InOut"}  # attribute -> annotation in ir.py


class SchemaError(Exception):
    """Raised if schema.fbs is illegal, or uses a part of the language that this script does not read."""


# ---------------------------------------------------------------------------
# Schema
# ---------------------------------------------------------------------------


@dataclass
class Member:
    """A field of a table or struct. `default` is the literal in the schema, `mark` a key of MARKS."""

    name: str
    type: str
    default: str | None = None
    required: bool = False
    mark: str = ""
    comment: str = ""


@dataclass
class Schema:
    """What schema.fbs declares, by name. `comments` has the comment above a declaration, `order` all names in order."""

    structs: dict[str, list[Member]] = field(default_factory=dict)
    tables: dict[str, list[Member]] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    ops: dict[str, tuple[int, str]] = field(default_factory=dict)  # name of an IR node -> its tag, its table
    comments: dict[str, list[str]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    root: str = ""


TOKEN = re.compile(r'//[^\n]*|"[^"\n]*"|[A-Za-z_][\w.]*|-?[\d.]+(?:[eE][-+]?\d+)?|[^\s\w]')


class Parser:
    """A recursive descent parser. `comments` has the text of each `//` comment by line number."""

    def __init__(self, source: str):
        self.comments: dict[int, str] = {}
        self.tokens: list[tuple[str, int]] = []
        for match in TOKEN.finditer(source):
            line = source.count("\n", 0, match.start()) + 1
            if match[0].startswith("//"):
                self.comments[line] = match[0][2:].strip()
            else:
                self.tokens.append((match[0], line))
        self.code_lines = {line for _, line in self.tokens}
        self.position = 0

    def peek(self) -> str:
        return self.tokens[self.position][0] if self.position < len(self.tokens) else ""

    def next(self, *expected: str) -> str:
        token = self.peek()
        if not token or (expected and token not in expected):
            line = self.tokens[min(self.position, len(self.tokens) - 1)][1]
            choices = " or ".join(map(repr, expected)) or "another token"
            raise SchemaError(f"line {line}: got {token!r}, expected {choices}")
        self.position += 1
        return token

    def optional(self, token: str) -> bool:
        found = self.peek() == token
        self.position += found
        return found

    def comment_above(self) -> list[str]:
        """Return the lines of the comment that ends in the line above the next token."""
        line, lines = self.tokens[self.position][1] - 1, []
        while line in self.comments and line not in self.code_lines:
            lines.insert(0, self.comments[line])
            line -= 1
        return lines

    def schema(self) -> Schema:
        schema = Schema()
        while self.peek():
            comment = self.comment_above()
            keyword = self.next("namespace", "attribute", "struct", "table", "enum", "union", "root_type")
            name = self.next()
            if keyword in ("struct", "table"):
                (schema.structs if keyword == "struct" else schema.tables)[name] = self.members()
            elif keyword == "enum":
                self.next(":"), self.next("byte")
                schema.enums[name] = {key: value for key, value, _ in self.values(0)}
            elif keyword == "union":
                if name != UNION:
                    raise SchemaError(f"union {name}: the only union is {UNION}")
                schema.ops = {op: (tag, table) for op, tag, table in self.values(1)}
            else:
                self.next(";")
            if keyword == "root_type":
                schema.root = name
            elif keyword not in ("namespace", "attribute"):
                schema.comments[name] = comment
                schema.order.append(name)
        return schema

    def members(self) -> list[Member]:
        self.next("{")
        members = []
        while not self.optional("}"):
            member = Member(self.next(), "")
            self.next(":")
            member.type = f"[{self.next()}]" if self.optional("[") else self.next()
            if member.type.startswith("["):
                self.next("]")
            if self.optional("="):
                member.default = self.next()
            if self.optional("("):
                self.attributes(member)
            self.next(";")
            member.comment = self.comments.get(self.tokens[self.position - 1][1], "")
            members.append(member)
        return members

    def attributes(self, member: Member) -> None:
        while True:
            attribute = self.next("required", *filter(None, MARKS))
            if attribute == "required":
                member.required = True
            else:
                member.mark = attribute
            if self.next(",", ")") == ")":
                return

    def values(self, value: int):
        """Yield (name, value, alias) for each member of an enum or union. `value` is the number of the first member."""
        self.next("{")
        while not self.optional("}"):
            name = self.next()
            alias = self.next() if self.optional(":") else name
            if self.optional("="):
                value = int(self.next())
            yield name, value, alias
            value += 1
            if self.peek() != "}":
                self.next(",")


def parse(source: str) -> Schema:
    """Parse a schema and return it. Raises SchemaError if it breaks a rule on which the generated files rely."""
    schema = Parser(source).schema()
    for name, members in schema.structs.items():
        if [(m.name, m.type) for m in members] != [("idx", "uint32")]:
            raise SchemaError(f"struct {name}: a struct is a slot id, with one field `idx: uint32`")
    known = {*SCALARS, "string", UNION, *schema.structs, *schema.tables, *schema.enums}
    for name, members in schema.tables.items():
        for m in members:
            if m.type.strip("[]") not in known or m.type == f"[{UNION}]":
                raise SchemaError(f"{name}.{m.name}: unknown type {m.type}")
    for op, (_, table) in schema.ops.items():
        if table not in schema.tables:
            raise SchemaError(f"{UNION}.{op}: {table} is not a table")
    if schema.root not in schema.tables:
        raise SchemaError(f"root_type {schema.root!r} is not a table")
    check_marks(schema)
    return schema


def check_marks(schema: Schema) -> None:
    """Check that marked fields are slots, and that a field name has the same mark in every table.

    The runtime uses the marks to protect constants. The check therefore finds a new table whose field
    `out` has no mark. Raises SchemaError.
    """
    marks: dict[str, tuple[str, str]] = {}  # field name -> its mark, the first table that has it
    for name, members in schema.tables.items():
        for m in members:
            if m.mark and m.type.strip("[]") not in schema.structs:
                raise SchemaError(f"{name}.{m.name}: got ({m.mark}) on {m.type}, expected it on slots only")
            mark, first = marks.setdefault(m.name, (m.mark, name))
            if m.mark != mark:
                raise SchemaError(
                    f"{name}.{m.name}: got {_mark_name(m.mark)}, expected {_mark_name(mark)} as in {first}"
                )


def _mark_name(mark: str) -> str:
    return f"({mark})" if mark else "no mark"


# ---------------------------------------------------------------------------
# ir.py
# ---------------------------------------------------------------------------

IR_HEADER = '''\
# Generated from schema.fbs by generate.py. Do not edit.
"""The MLX IR: one class per table and one class per op.

A field without a default is required. `Output` and `InOut` mark the fields that an
instruction writes. An op inherits the fields of its table; `FIELDS` describes them
(see table.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .table import Field, InOut, Op, Output, Table, {scalars}
'''

IR_FOOTER = f'''
FIRST_EXTENSION = {FIRST_EXTENSION}
"""The first tag of the extensions: nodes that ExecuTorch's own MLX delegate lacks."""

OPS: dict[int, type[Op]] = {{op.OP_TYPE: op for op in Op.__subclasses__()}}
"""Every op by its tag in the union."""
'''


def python_field(schema: Schema, m: Member) -> str:
    type_ = "Op" if m.type == UNION else m.type.replace("[", "list[")
    if m.required:
        annotation, default = type_, None
    elif m.default == "null" or (m.type not in SCALARS and m.type not in schema.enums):
        annotation, default = f"{type_} | None", "None"
    elif m.type in schema.enums:
        name = m.default or next(iter(schema.enums[m.type]))
        annotation, default = type_, f"{m.type}.{name}"
    elif m.type == "bool":
        annotation, default = type_, (m.default or "false").capitalize()
    else:
        annotation = type_
        default = m.default or ("0" if m.type in INTS else "0.0")
    if m.mark:
        annotation = f"{MARKS[m.mark]}[{annotation}]"
    line = f"    {m.name}: {annotation}" + (f" = {default}" if default else "")
    return f"{line}  # {m.comment}" if m.comment else line


def python_class(schema: Schema, name: str) -> list[str]:
    if name in schema.structs:
        head, body = ["@dataclass(frozen=True)", f"class {name}:"], ["    idx: int"]
    elif name in schema.enums:
        head = [f"class {name}(IntEnum):"]
        body = [f"    {key} = {value}" for key, value in schema.enums[name].items()]
    else:
        head = ["@dataclass(kw_only=True)", f"class {name}(Table):"]
        body = [python_field(schema, m) for m in schema.tables[name]]
    comment = schema.comments[name]
    if len(comment) == 1:
        head.append(f'    """{comment[0]}"""')
    elif comment:
        head += [f'    """{comment[0]}', *(f"    {line}" for line in comment[1:]), '    """']
    elif not body:
        head.append("    pass")
    return ["", "", *head, *([""] if comment and body else []), *body]


def python_op(name: str, tag: int, table: str) -> str:
    return f"class {name}({table}, Op): OP_TYPE = {tag}"


def generate_ir(schema: Schema) -> str:
    """Return the source of ir.py."""
    used = {m.type.strip("[]") for members in schema.tables.values() for m in members}
    scalars = [t for t in (*INTS, "double", "string") if t in used]
    lines = [IR_HEADER.format(scalars=", ".join(scalars)).rstrip()]
    lines += [line for name in schema.order if name != UNION for line in python_class(schema, name)]
    lines += ["", "", "# fmt: off"]
    lines += [python_op(name, *value) for name, value in schema.ops.items()]
    lines += ["# fmt: on", "", IR_FOOTER.strip()]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------
# output_fields.h
# ---------------------------------------------------------------------------

OUTPUT_FIELDS_TEMPLATE = """\
// Generated from schema.fbs by generate.py. Do not edit.
#pragma once

#include <string_view>

namespace executorch_mlx {

// Whether an instruction writes the slots in the field `name`. generate.py checks
// that a name means the same in every node.
constexpr bool is_output_field(std::string_view name) {
  return OUTPUT;
}

// Whether an instruction both reads and writes the slots in the field `name`.
constexpr bool is_inout_field(std::string_view name) {
  return INOUT;
}

} // namespace executorch_mlx
"""


def generate_output_fields(schema: Schema) -> str:
    """Return the source of output_fields.h."""

    def any_of(*marks: str) -> str:
        names = sorted({m.name for members in schema.tables.values() for m in members if m.mark in marks})
        return " || ".join(f'name == "{name}"' for name in names) or "false"

    source = OUTPUT_FIELDS_TEMPLATE.replace("OUTPUT", any_of("output", "inout"))
    return source.replace("INOUT", any_of("inout"))


# ---------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------


def find_flatc() -> str:
    """Return the path of flatc: the one in the executorch wheel, or else the one on PATH."""
    spec = importlib.util.find_spec("executorch")  # does not import it
    for root in (spec.submodule_search_locations or []) if spec else []:
        flatc = Path(root, "data", "bin", "flatc")
        if flatc.is_file():
            return str(flatc)
    on_path = shutil.which("flatc")
    if not on_path:
        raise SchemaError("flatc: found neither in an executorch wheel nor on PATH; pass --flatc PATH")
    return on_path


def check_with_flatc(schema: Path, flatc: str) -> None:
    """Raise SchemaError with flatc's message if the schema is illegal."""
    with tempfile.TemporaryDirectory() as out:
        command = [flatc, "--binary", "--schema", "-o", out, str(schema)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise SchemaError(f"{flatc}: {error.strerror}") from error
    if done.returncode:
        raise SchemaError((done.stderr + done.stdout).strip())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=f"Generate {IR.name} and {OUTPUT_FIELDS.name} from {SCHEMA.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    parser.add_argument("--flatc", metavar="PATH", help="default: flatc of the executorch wheel, or on PATH")
    parser.add_argument("--no-flatc", action="store_true", help="do not check the schema with flatc")
    args = parser.parse_args(argv)
    try:
        if not args.no_flatc:
            check_with_flatc(SCHEMA, args.flatc or find_flatc())
        schema = parse(SCHEMA.read_text())
    except SchemaError as error:
        print(f"{SCHEMA.name}: {error}", file=sys.stderr)
        return 1
    sources = {IR: generate_ir(schema), OUTPUT_FIELDS: generate_output_fields(schema)}
    stale = [path for path, source in sources.items() if not path.exists() or path.read_text() != source]
    for path in stale:
        if args.check:
            print(f"{path.name} does not match {SCHEMA.name}: run {Path(__file__).name}", file=sys.stderr)
        else:
            path.write_text(sources[path])
            print(f"wrote {path}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
