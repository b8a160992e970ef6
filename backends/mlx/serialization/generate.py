#!/usr/bin/env python3
"""Writes ir.py, the IR as Python dataclasses, from schema.fbs.

    python backends/mlx/serialization/generate.py [--check] [--flatc PATH]

Why not `flatc --python`: it writes one module a table, several thousand lines,
and no types that a checker or an IDE could use. ir.py holds one dataclass a table
and one line an op; pack.py and read.py are generic over its fields.

flatc judges whether the schema is legal; the parser here reads only the part of
the language that the schema uses and refuses the rest. It needs nothing but the
standard library, so that it runs before anything is built or installed.
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

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SCALARS = (*INTS, "float", "double", "bool")
UNION = "OpNode"
FIRST_OWN_OP = 200  # see schema.fbs


class SchemaError(Exception):
    """schema.fbs is not legal, or uses more of the language than is read here."""


# ---------------------------------------------------------------------------
# Schema
# ---------------------------------------------------------------------------


@dataclass
class Member:
    """A field of a table or struct, as it is spelled: `default` is text."""

    name: str
    type: str
    default: str | None = None
    required: bool = False
    comment: str = ""


@dataclass
class Schema:
    structs: dict[str, list[Member]] = field(default_factory=dict)
    tables: dict[str, list[Member]] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    ops: dict[str, tuple[int, str]] = field(default_factory=dict)  # name -> tag, table
    comments: dict[str, list[str]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    root: str = ""


TOKEN = re.compile(r'//[^\n]*|"[^"\n]*"|[A-Za-z_][\w.]*|-?[\d.]+(?:[eE][-+]?\d+)?|[^\s\w]')


class Parser:
    """Recursive descent over tokens; `//` comments are kept by their line."""

    def __init__(self, text: str):
        self.comments: dict[int, str] = {}
        self.tokens: list[tuple[str, int]] = []
        for match in TOKEN.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            if match[0].startswith("//"):
                self.comments[line] = match[0][2:].strip()
            else:
                self.tokens.append((match[0], line))
        self.code_lines = {line for _, line in self.tokens}
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def next(self, *expected: str) -> str:
        token = self.peek()
        if not token or (expected and token not in expected):
            line = self.tokens[min(self.at, len(self.tokens) - 1)][1]
            wanted = " or ".join(map(repr, expected)) or "more"
            raise SchemaError(f"line {line}: got {token!r}, expected {wanted}")
        self.at += 1
        return token

    def optional(self, token: str) -> bool:
        found = self.peek() == token
        self.at += found
        return found

    def comment_above(self) -> list[str]:
        """The comment that ends on the line before the next token."""
        line, lines = self.tokens[self.at][1] - 1, []
        while line in self.comments and line not in self.code_lines:
            lines.insert(0, self.comments[line])
            line -= 1
        return lines

    def schema(self) -> Schema:
        schema = Schema()
        while self.peek():
            comment = self.comment_above()
            keyword = self.next("namespace", "struct", "table", "enum", "union", "root_type")
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
            elif keyword != "namespace":
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
                member.required = bool(self.next("required"))
                self.next(")")
            self.next(";")
            member.comment = self.comments.get(self.tokens[self.at - 1][1], "")
            members.append(member)
        return members

    def values(self, value: int):
        """(name, value, alias) of every enum or union member."""
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


def parse(text: str) -> Schema:
    """Reads a schema and checks what Python relies on; raises SchemaError."""
    schema = Parser(text).schema()
    for name, members in schema.structs.items():
        if [(m.name, m.type) for m in members] != [("idx", "uint32")]:
            raise SchemaError(f"struct {name}: a struct is a slot id, `idx: uint32`")
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
    return schema


# ---------------------------------------------------------------------------
# Python
# ---------------------------------------------------------------------------

HEADER = '''\
# Generated from schema.fbs by generate.py; edit those.
"""The MLX delegate's IR: a class a table, and a class an op.

A field without a default has to be given. An op inherits the fields of the table
that it has on the wire; `FIELDS` describes them (see table.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .table import Field, Op, Table, {scalars}
'''

FOOTER = '''
OPS: dict[int, type[Op]] = {op.OP_TYPE: op for op in Op.__subclasses__()}
"""Every op, by its tag in the union."""
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
    text = f"    {m.name}: {annotation}" + (f" = {default}" if default else "")
    return f"{text}  # {m.comment}" if m.comment else text


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


def generate(schema: Schema) -> str:
    """The text of ir.py."""
    used = {m.type.strip("[]") for members in schema.tables.values() for m in members}
    scalars = [t for t in (*INTS, "double", "string") if t in used]
    lines = [HEADER.format(scalars=", ".join(scalars)).rstrip()]
    lines += [line for name in schema.order if name != UNION for line in python_class(schema, name)]
    lines += ["", "", "# fmt: off"]
    lines += [python_op(name, *value) for name, value in schema.ops.items()]
    lines += ["# fmt: on", "", FOOTER.strip()]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------
# Program
# ---------------------------------------------------------------------------


def find_flatc() -> str:
    """flatc of the executorch wheel, else the one on the path."""
    spec = importlib.util.find_spec("executorch")  # imports nothing
    for root in (spec.submodule_search_locations or []) if spec else []:
        flatc = Path(root, "data", "bin", "flatc")
        if flatc.is_file():
            return str(flatc)
    flatc = shutil.which("flatc")
    if not flatc:
        raise SchemaError("flatc: neither in an executorch wheel nor on PATH; give --flatc PATH")
    return flatc


def compile_schema(schema: Path, flatc: str) -> None:
    """Lets flatc judge the schema; raises SchemaError with what it says."""
    with tempfile.TemporaryDirectory() as out:
        command = [flatc, "--binary", "--schema", "-o", out, str(schema)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise SchemaError(f"{flatc}: {error.strerror}") from error
    if done.returncode:
        raise SchemaError((done.stderr + done.stdout).strip())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write ir.py from schema.fbs.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    parser.add_argument("--flatc", metavar="PATH", help="default: the executorch wheel's")
    args = parser.parse_args(argv)
    try:
        compile_schema(SCHEMA, args.flatc or find_flatc())
        text = generate(parse(SCHEMA.read_text()))
    except SchemaError as error:
        print(f"{SCHEMA.name}: {error}", file=sys.stderr)
        return 1
    if IR.exists() and IR.read_text() == text:
        return 0
    if args.check:
        print(f"{IR.name} does not match {SCHEMA.name}: run {Path(__file__).name}", file=sys.stderr)
        return 1
    IR.write_text(text)
    print(f"wrote {IR}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
