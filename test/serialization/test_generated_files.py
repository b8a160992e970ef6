"""generate.py: ir.py does not drift, and what is not legal is refused with a line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from executorch_mlx.serialization import generate, ir


def run(folder: Path, *args: str) -> subprocess.CompletedProcess:
    """As a plain script: -I keeps the working directory and PYTHONPATH out."""
    command = [sys.executable, "-I", str(folder / "generate.py"), *args]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path) -> Path:
    for path in (generate.SCHEMA, generate.IR, Path(generate.__file__)):
        shutil.copy(path, tmp_path)
    return tmp_path


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def test_no_drift():
    done = run(generate.HERE, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "name, before, after",
    [
        ("schema.fbs", "decimals: int32 = 0;", "decimals: int32 = 0; more: int32;"),
        ("schema.fbs", "FlipNode: FlipParams", "FlipNode: FlipParams, MyNode: UnaryNode"),
        ("ir.py", "(UnaryNode, Op): OP_TYPE = 35", "(UnaryNode, Op): OP_TYPE = 36"),
    ],
)
def test_drift(copy, name, before, after):
    edit(copy / name, before, after)
    stale = (copy / "ir.py").read_text()
    done = run(copy, "--check")
    assert done.returncode == 1
    assert done.stderr == "ir.py does not match schema.fbs: run generate.py\n"
    assert (copy / "ir.py").read_text() == stale
    assert run(copy).returncode == 0
    assert (copy / "ir.py").read_text() != stale
    assert run(copy, "--check").returncode == 0


@pytest.mark.parametrize(
    "before, after, says",
    [
        # flatc's own
        ("decimals: int32 = 0;", "decimals: int32 = 0", "expecting: ; instead got: }"),
        ("decimals: int32 = 0;", "x: int32;", "field already exists: x"),
        ("decimals: int32 = 0;", "decimals: Nothing;", "type referenced but not defined"),
        # legal, and not read here
        ("decimals: int32 = 0;", "decimals: int32 (deprecated);", "got 'deprecated'"),
        ("decimals: int32 = 0;", "decimals: short;", "RoundParams.decimals: unknown type short"),
        ("struct Vid { idx: uint32; }", "struct Vid { idx: uint64; }", "a struct is a slot id"),
        ("SlotType : byte", "SlotType : ubyte", "got 'ubyte', expected 'byte'"),
        ("root_type MLXGraph;", "union U { RoundParams } root_type MLXGraph;", "the only union"),
    ],
)
def test_illegal_schema(copy, before, after, says):
    edit(copy / "schema.fbs", before, after)
    done = run(copy)
    assert done.returncode == 1
    assert done.stderr.startswith("schema.fbs: ") and says in done.stderr
    assert "Traceback" not in done.stderr


def test_flatc_is_missing():
    done = run(generate.HERE, "--check", "--flatc", "/nowhere/flatc")
    assert done.returncode == 1
    assert done.stderr == "schema.fbs: /nowhere/flatc: No such file or directory\n"


def test_ops_are_the_union():
    schema = generate.parse(generate.SCHEMA.read_text())
    assert {op.NAME: tag for tag, op in ir.OPS.items()} == {
        name: tag for name, (tag, _) in schema.ops.items()
    }
    for name, (_, table) in schema.ops.items():
        op = getattr(ir, name)
        members = schema.tables[table]
        assert [(f.name, f.type, f.required) for f in op.FIELDS] == [
            (m.name, m.type, m.required) for m in members
        ]
        assert [f.id for f in op.FIELDS] == list(range(len(members)))


def test_fields():
    assert ir.Field("keepdims", 3, "bool", False, False) in ir.SumNode.FIELDS
    assert ir.Field("axes", 2, "[int32]", None, False) in ir.SumNode.FIELDS
    assert ir.Field("x", 0, "Tid", None, True) in ir.SumNode.FIELDS
    assert ir.Field("base", 6, "float", 500000.0, False) in ir.RopeNode.FIELDS
    assert ir.Field("scalar_type", 4, "int8", None, False) in ir.ARangeNode.FIELDS
    assert ir.Instruction.FIELDS == (ir.Field("op", 1, "OpNode", None, True),)
    assert ir.SlotVariant(idx=3).slot_type is ir.SlotType.TensorSlot
    with pytest.raises(TypeError, match="required keyword-only argument: 'out'"):
        ir.LogNode(x=ir.Tid(0))
