"""The files that generate.py writes are up to date, and an illegal schema is refused with one line."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from executorch_mlx.serialization import generate, ir


def run(folder: Path, *args: str) -> subprocess.CompletedProcess:
    """Run generate.py as a script. -I ignores the working directory and PYTHONPATH."""
    command = [sys.executable, "-I", str(folder / "generate.py"), *args]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path) -> Path:
    """A folder with a copy of the schema, the script and the generated files."""
    for path in (generate.SCHEMA, generate.IR, generate.OUTPUT_FIELDS, Path(generate.__file__)):
        shutil.copy(path, tmp_path)
    return tmp_path


def edit(path: Path, before: str, after: str) -> None:
    source = path.read_text()
    assert source.count(before) == 1
    path.write_text(source.replace(before, after))


def test_generated_files_are_up_to_date():
    done = run(generate.HERE, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "edited, before, after, stale",
    [
        ("schema.fbs", "decimals: int32 = 0;", "decimals: int32 = 0; more: int32;", ["ir.py"]),
        ("schema.fbs", "FlipNode: FlipParams", "FlipNode: FlipParams, MyNode: UnaryNode", ["ir.py"]),
        ("schema.fbs", "outs: [Tid] (", "parts: [Tid] (", ["ir.py", "output_fields.h"]),
        ("ir.py", "(UnaryNode, Op): OP_TYPE = 35", "(UnaryNode, Op): OP_TYPE = 36", ["ir.py"]),
        ("output_fields.h", '== "out"', '== "in"', ["output_fields.h"]),
    ],
)
def test_stale_file_fails_check(copy, edited, before, after, stale):
    edit(copy / edited, before, after)
    sources = {name: (copy / name).read_text() for name in stale}
    done = run(copy, "--check")
    assert done.returncode == 1
    assert done.stderr == "".join(f"{name} does not match schema.fbs: run generate.py\n" for name in stale)
    assert all((copy / name).read_text() == source for name, source in sources.items())
    assert run(copy).returncode == 0
    assert all((copy / name).read_text() != source for name, source in sources.items())
    assert run(copy, "--check").returncode == 0


@pytest.mark.parametrize(
    "before, after, message",
    [
        # refused by flatc
        ("decimals: int32 = 0;", "decimals: int32 = 0", "expecting: ; instead got: }"),
        ("decimals: int32 = 0;", "x: int32;", "field already exists: x"),
        ("decimals: int32 = 0;", "decimals: Nothing;", "type referenced but not defined"),
        # accepted by flatc, refused by generate.py
        ("decimals: int32 = 0;", "decimals: int32 (deprecated);", "got 'deprecated'"),
        ("decimals: int32 = 0;", "decimals: short;", "RoundParams.decimals: unknown type short"),
        ("struct Vid { idx: uint32; }", "struct Vid { idx: uint64; }", "a struct is a slot id"),
        ("SlotType : byte", "SlotType : ubyte", "got 'ubyte', expected 'byte'"),
        ("root_type MLXGraph;", "union U { RoundParams } root_type MLXGraph;", "the only union"),
        ("decimals: int32 = 0;", "decimals: int32 = 0 (output);", "RoundParams.decimals: got (output) on int32"),
        ("freqs: Tid;", "freqs: Tid; more: Tid; outs: [Tid];", "RopeParams.outs: got no mark"),
        ("sliced: [Tid] (", "outs: [Tid] (inout); sliced: [Tid] (", "ScanParams.outs: got (inout), expected (output)"),
    ],
)
def test_illegal_schema(copy, before, after, message):
    edit(copy / "schema.fbs", before, after)
    done = run(copy)
    assert done.returncode == 1
    assert done.stderr.startswith("schema.fbs: ") and message in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_flatc():
    done = run(generate.HERE, "--check", "--flatc", "/nowhere/flatc")
    assert done.returncode == 1
    assert done.stderr == "schema.fbs: /nowhere/flatc: No such file or directory\n"


def test_ops_are_the_members_of_the_union():
    schema = generate.parse(generate.SCHEMA.read_text())
    assert {op.NAME: tag for tag, op in ir.OPS.items()} == {name: tag for name, (tag, _) in schema.ops.items()}
    for name, (_, table) in schema.ops.items():
        op = getattr(ir, name)
        members = schema.tables[table]
        assert [(f.name, f.type, f.required, f.output, f.inout) for f in op.FIELDS] == [
            (m.name, m.type, m.required, m.mark != "", m.mark == "inout") for m in members
        ]
        assert [f.id for f in op.FIELDS] == list(range(len(members)))


def test_fields():
    assert ir.Field("keepdims", 3, "bool", False, False) in ir.SumNode.FIELDS
    assert ir.Field("axes", 2, "[int32]", None, False) in ir.SumNode.FIELDS
    assert ir.Field("x", 0, "Tid", None, True) in ir.SumNode.FIELDS
    assert ir.Field("out", 1, "Tid", None, True, output=True) in ir.SumNode.FIELDS
    assert ir.Field("outs", 1, "[Tid]", None, True, output=True) in ir.SplitNode.FIELDS
    assert ir.Field("carry", 3, "[Tid]", None, True, output=True, inout=True) in ir.ScanNode.FIELDS
    assert ir.Field("base", 6, "float", 500000.0, False) in ir.RopeNode.FIELDS
    assert ir.Field("scalar_type", 4, "int8", None, False) in ir.ARangeNode.FIELDS
    assert (ir.Field("op", 1, "OpNode", None, True),) == ir.Instruction.FIELDS
    assert ir.SlotVariant(idx=3).slot_type is ir.SlotType.TensorSlot
    with pytest.raises(TypeError, match="required keyword-only argument: 'out'"):
        ir.LogNode(x=ir.Tid(0))


def test_every_op_but_noop_and_if_has_an_output_field():
    without = {op.NAME for op in ir.OPS.values() if not any(f.output for f in op.FIELDS)}
    assert without == {"NoopNode", "IfNode"}, "mark the fields that an instruction writes with (output)"


def test_output_fields_header_lists_the_marked_fields():
    names = {f.name: f.inout for op in ir.OPS.values() for f in op.FIELDS if f.output}
    written = ("out", "out_k", "out_q", "out_scales", "out_state", "out_v", "outs", "outputs", "sliced")
    assert names == {**dict.fromkeys(written, False), "carry": True}
    is_output, is_inout = re.findall(r"return (.*);", generate.OUTPUT_FIELDS.read_text())
    assert re.findall(r'name == "(\w+)"', is_output) == sorted(names)
    assert re.findall(r'name == "(\w+)"', is_inout) == ["carry"]
