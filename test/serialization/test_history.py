"""The schema only appends to the recorded wire format, and agrees with that of ExecuTorch's own MLX delegate."""

import json
import re

import history
import pytest
from executorch_mlx.serialization import generate


@pytest.fixture(scope="module")
def source() -> str:
    return generate.SCHEMA.read_text()


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(history.RECORD.read_text())


def test_schema_only_appends_to_record(record, source):
    assert len(record["ops"]) >= 136
    assert history.violations(record, generate.parse(source)) == []


def test_record_is_up_to_date(source):
    """The commit that adds an op also updates the record."""
    recorded, current = history.RECORD.read_text(), history.dump(history.wire(generate.parse(source)))
    assert recorded == current, "run python test/serialization/history.py"


# The end of the union.
END = "}\n\n// " + "-" * 75 + "\n// Program"

# edit, source before, source after, expected violation (None: the edit is allowed)
EDITS = [
    ("field appended", "decimals: int32 = 0;", "decimals: int32 = 0; more: int32 = 7;", None),
    ("field removed", "  decimals: int32 = 0;\n", "", "RoundNode: .*decimals.* is gone"),
    ("field renamed", "decimals: int32", "digits: int32", "RoundNode: 3: was 'decimals"),
    ("field retyped", "decimals: int32", "decimals: int64", "RoundNode: 3: was 'decimals: int32"),
    ("default changed", "decimals: int32 = 0", "decimals: int32 = 1", "RoundNode: 3: was .* = 0'"),
    ("null default lost", "init_value: float = null", "init_value: float", "MetalKernelNode: "),
    ("float default changed", "base: float = 500000.0", "base: float = 10000.0", "RopeNode: 7: "),
    ("required lost", "reps: [IntOrVid] (required)", "reps: [IntOrVid]", "TileNode: 3: "),
    ("required gained", "freqs: Tid;", "freqs: Tid (required);", "RopeNode: 5: "),
    ("scalar made a vector", "bias: Tid;", "bias: [Tid];", "AddmmNode: 4: "),
    (
        "fields swapped",
        "  reverse: bool = false;\n  inclusive: bool = true;",
        "  inclusive: bool = true;\n  reverse: bool = false;",
        "CumsumNode: 4: ",
    ),
    (
        "required field appended",
        "decimals: int32 = 0;",
        "decimals: int32 = 0; more: Tid (required);",
        "RoundNode: 'more: Tid .* is added as required",
    ),
    ("field inserted", "  decimals: int32 = 0;", "  more: int32; decimals: int32 = 0;", "RoundNode: 3: was 'decimals"),
    (
        "shared table extended",
        "  keepdims: bool = false;\n  ddof: int32 = 0;",
        "  keepdims: bool = false;\n  ddof: int32 = 0; more: int32;",
        "StdNode: table VarianceNode is frozen, because 2 ops share it",
    ),
    ("struct field widened", "struct Vid { idx: uint32; }", "struct Vid { idx: uint64; }", "slot id"),
    ("program field appended", "tensor_meta: [", "more: string; tensor_meta: [", "MLXGraph: 14: "),
    ("program table renamed", "ShapeDim", "Dim", "tables: ShapeDim is gone"),
    ("root changed", "root_type MLXGraph", "root_type NamedSlot", "root: was MLXGraph"),
    ("enum value appended", "  BoolValueSlot = 3", "  BoolValueSlot = 3, More = 4", None),
    ("enum value inserted", "IntValueSlot = 1,", "Early = -1, IntValueSlot = 1,", "not at the end"),
    ("enum value changed", "BoolValueSlot = 3", "BoolValueSlot = 4", "BoolValueSlot was 3, is 4"),
    ("enum value removed", ",\n  BoolValueSlot = 3", "", "BoolValueSlot was 3, is None"),
    ("op table renamed", "RoundParams", "RoundNode", None),
    ("extension appended", END, "My: UnaryNode = 255" + END, None),
    ("extension between others", "= 230,", "= 230, My: UnaryNode = 235,", None),
    ("extension takes a tag", "  SampleNode:", "  My: UnaryNode = 200, SampleNode:", "My: tag 200 is not"),
    ("op appended", "FlipNode: FlipParams", "FlipNode: FlipParams, My: UnaryNode", None),
    ("op removed", "  FlipNode: FlipParams,\n", "", "ops: FlipNode is gone"),
    ("op renamed", "FlipNode:", "ReverseNode:", "ops: FlipNode is gone"),
    ("op inserted", "  TruncNode:", "  My: UnaryNode,\n  TruncNode:", "TruncNode: 0: was 135, is"),
    ("op renumbered", "FlipParams,", "FlipParams = 140,", "FlipNode: 0: was 136, is 140"),
    ("tag taken", "TruncNode: UnaryNode", "TruncNode: UnaryNode = 136", "TruncNode: 0: was 135"),
    ("op retyped", "TruncNode: UnaryNode", "TruncNode: AxisNode", "TruncNode: table AxisNode is frozen"),
    ("tag reused", END, "My: UnaryNode = 7" + END, "My: tag 7 is not"),
    ("tag twice", END, "My: UnaryNode = 7" + END, "tag 7 is given to 2 ops"),
    ("tag too large", END, "My: UnaryNode = 256" + END, "My: tag 256 is not"),
    ("comment changed", "// runs in every call", "// runs", None),
    ("output mark removed", "outs: [Tid] (required, output)", "outs: [Tid] (required)", None),
]


@pytest.mark.parametrize("before, after, violation", [e[1:] for e in EDITS], ids=[e[0] for e in EDITS])
def test_edit(before, after, violation, record, source):
    assert before in source
    try:
        found = history.violations(record, generate.parse(source.replace(before, after)))
    except generate.SchemaError as error:  # the edited schema is illegal
        found = [str(error)]
    if violation is None:
        assert found == []
    else:
        assert [line for line in found if re.search(violation, line)], found


def test_extensions_are_numbered_from_200(official_schema, source):
    official = history.wire(generate.parse(official_schema.read_text()))
    ours = history.wire(generate.parse(source))
    assert all(ours["ops"][op][0] >= 200 for op in ours["ops"].keys() - official["ops"].keys())


def test_official_ops_have_the_same_wire_format(official_schema, source):
    official = history.wire(generate.parse(official_schema.read_text()))
    ours = history.wire(generate.parse(source))
    assert len(official["ops"]) == 136
    assert {op: ours["ops"][op] for op in official["ops"]} == official["ops"]
    assert {op: entry[0] for op, entry in official["ops"].items()} == {op: i for i, op in enumerate(official["ops"], 1)}


EXTENSION_FIELDS = {"MLXGraph": ["replacements: [Replacement]"]}


@pytest.mark.parametrize("kind", ["root", "structs", "enums", "tables"])
def test_official_types_have_the_same_wire_format(kind, official_schema, source):
    official = history.wire(generate.parse(official_schema.read_text()))
    ours = history.wire(generate.parse(source))
    expected = dict(official[kind])
    for name, fields in EXTENSION_FIELDS.items():
        if name in expected:
            expected[name] = [*expected[name], *fields]  # at the end, where the official delegate does not read them
    assert {name: ours[kind][name] for name in expected} == expected
