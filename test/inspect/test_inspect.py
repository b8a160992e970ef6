"""The command `inspect` on exported files, and its errors on damaged and unrelated files."""

import json
import random
import shutil
import xml.etree.ElementTree as ElementTree

import pytest
from executorch_mlx.cli.main import main
from executorch_mlx.inspect.pte import Delegate
from executorch_mlx.inspect.report import describe
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.read import read_payload
from irprograms import FLOAT32, Graph


@pytest.fixture
def inspect(capsys):
    def run(*arguments) -> tuple[int, str, str]:
        code = main(["inspect", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def report(inspect, net) -> dict:
    code, out, _ = inspect(net, "--json")
    assert code == 0
    return json.loads(out)


def by_method(report) -> dict[str, dict]:
    return {d["method"]: d for d in report["delegates"]}


def test_json_has_sizes_and_counts(report, net):
    assert report["file"] == {"bytes": net.stat().st_size, "methods": ["branches", "forward"]}
    forward = by_method(report)["forward"]
    weights = {t["name"]: t for t in forward["tensors"] if t["space"] == "constant"}
    assert weights["linear.weight"]["shape"] == [4, 8]
    assert weights["linear.weight"]["bytes"] == weights["linear.weight"]["stored_bytes"] == 4 * 8 * 4
    assert forward["constants"] == {"count": len(weights), "bytes": sum(t["bytes"] for t in weights.values())}
    assert forward["buffers"] == {"count": 1, "bytes": 16}
    assert forward["instructions"] == sum(forward["ops"].values()) == sum(map(len, forward["chains"]))
    assert {"Addmm", "Gelu", "Softmax"} <= forward["ops"].keys()


def test_dynamic_extent_has_bounds(report):
    (x,) = [t for t in by_method(report)["forward"]["tensors"] if t["space"] == "input"]
    assert (x["shape"], x["dtype"], x["bounds"]) == ([None, 8], "float32", [[0, 16], None])
    assert x["bytes"] == 16 * 8 * 4


def test_temporaries_have_types(report):
    (chain,) = by_method(report)["forward"]["chains"]
    types = {i["op"]: i["results"][0]["type"] for i in chain if i["results"]}
    assert types["Addmm"] == types["Gelu"] == types["Softmax"] == "float32[?, 4]"
    assert types["Transpose"] == "float32[8, 4]"


def test_peak_uses_largest_batch(report):
    temporaries = by_method(report)["forward"]["temporaries"]
    assert temporaries["of_unknown_size"] == 0
    # At most three temporaries are live at a time: an operand and its result, both float32[16, 4], and the new value of
    # `steps`, float32[4].
    assert temporaries["peak_bytes"] == 2 * 16 * 4 * 4 + 4 * 4


def test_replacements_are_listed(inspect, tmp_path):
    graph = Graph()
    x, t, y, z = graph.input((3,)), graph.new_temp(), graph.output((3,)), graph.output((3,))
    graph.emit(ir.AddNode(a=x, b=x, out=t), ir.MultiplyNode(a=t, b=t, out=y), ir.AbsNode(x=x, out=z))
    graph.replacements = [(0, 0, 2, ir.NegNode(x=x, out=y))]
    path = tmp_path / "replaced.pte"
    path.write_bytes(graph.pte())
    lines = inspect(path)[1].splitlines()
    assert "  replaced      2 of the instructions, by Neg 1" in lines
    assert [line for line in lines if "in place of 0 to 1, the MLX delegate of this project runs Neg(x=" in line]


def test_branches_are_chains(report):
    branches = by_method(report)["branches"]
    (if_,) = [i for chain in branches["chains"] for i in chain if i["op"] == "If"]
    assert len(if_["chains"]) == 2
    then, otherwise = (branches["chains"][c] for c in if_["chains"])
    assert "Exp" in [i["op"] for i in then] and "Sin" in [i["op"] for i in otherwise]
    for chain in branches["chains"]:
        for instruction in chain:
            assert "?" not in str([r["type"] for r in instruction["results"]])


def test_text_has_names_and_types(inspect, net):
    code, out, _ = inspect(net)
    assert code == 0
    assert "linear.weight: float32[4, 8]" in out
    assert "x: float32[?, 8]" in out
    (line,) = [line for line in out.splitlines() if "Addmm(" in line]
    assert "float32[?, 4] = Addmm(mat1=x, mat2=" in line and "bias=linear.bias" in line


def test_summary_omits_instructions(inspect, net):
    _, out, _ = inspect(net, "--summary")
    assert "temporaries" in out and "Addmm(" not in out


def test_method_option_selects_a_method(inspect, net):
    _, out, _ = inspect(net, "--json", "--method", "branches")
    assert by_method(json.loads(out)).keys() == {"branches"}


def test_payload_option_writes_programs(inspect, net, tmp_path):
    code, out, _ = inspect(net, "--payload", tmp_path / "out")
    assert code == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [f.name for f in files] == ["branches.0.mlx", "forward.0.mlx"]
    assert all(f.name in out for f in files)
    graph = read_payload(files[1].read_bytes())
    assert graph.num_mutable_buffer_tensors == 1


def test_dot_has_all_instructions_and_edges(inspect, net, report):
    code, out, _ = inspect(net, "--dot", "--method", "forward")
    assert code == 0 and out.startswith("digraph") and out.count("{") == out.count("}")
    forward = by_method(report)["forward"]
    for instruction in forward["chains"][0]:
        assert f'd0_0_{instruction["index"]} [label="{instruction["op"]}' in out
    operands = sum("tensor" in v for i in forward["chains"][0] for v in i["operands"].values() if isinstance(v, dict))
    assert out.count(" -> ") == operands + len(forward["outputs"])


def test_svg_needs_graphviz(inspect, net):
    code, out, err = inspect(net, "--svg")
    if shutil.which("dot") is None:
        assert code == 1 and "graphviz" in err and out == ""
    else:
        assert code == 0 and ElementTree.fromstring(out).tag.endswith("svg")


# -- damaged and unrelated files ---------------------------------------------------


def error_of(inspect, path) -> str:
    """Return the one line that `inspect` prints on failure."""
    code, out, err = inspect(path)
    assert code == 1 and out == "" and err.count("\n") == 1
    return err


def test_file_without_mlx(inspect, portable):
    assert "has no MLX delegate" in error_of(inspect, portable)


def test_unknown_method(inspect, net):
    code, _, err = inspect(net, "--method", "backward")
    assert code == 1 and "no method backward" in err and "forward" in err


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4" * 100, bytes(4096)])
def test_other_kind_of_file(inspect, tmp_path, content):
    (tmp_path / "file.pte").write_bytes(content)
    assert "not a .pte file" in error_of(inspect, tmp_path / "file.pte")


def test_missing_file(inspect, tmp_path):
    assert "nothing.pte" in error_of(inspect, tmp_path / "nothing.pte")


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_truncated_file(inspect, net, tmp_path, share):
    data = net.read_bytes()
    (tmp_path / "truncated.pte").write_bytes(data[: int(len(data) * share)])
    error = error_of(inspect, tmp_path / "truncated.pte")
    assert "truncated" in error or "damaged" in error


def test_damaged_payload(inspect, net, tmp_path):
    data = net.read_bytes()
    assert data.count(b"MLX0") == 2
    (tmp_path / "bad.pte").write_bytes(data.replace(b"MLX0", b"MLX9"))
    assert "magic" in error_of(inspect, tmp_path / "bad.pte")


def test_damaged_bytes_never_raise_a_traceback(inspect, net, tmp_path):
    """Random bytes are overwritten. The result is a report or a one-line error."""
    data, generator, codes = net.read_bytes(), random.Random(0), []
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(4):
            damaged[generator.randrange(len(data))] = generator.randrange(256)
        (tmp_path / "bad.pte").write_bytes(damaged)
        code, out, err = inspect(tmp_path / "bad.pte")
        assert code in (0, 1) and err.count("\n") == code
        codes.append(code)
    assert {0, 1} == set(codes)


# -- scans -----------------------------------------------------------------------


def test_scan_lists_slices_and_outputs_with_their_types():
    """A scan over float32[3, 2]: slot 2 has a slice, slot 1 the stacked outputs."""
    body = ir.ExpNode(x=ir.Tid(2), out=ir.Tid(1))
    scan = ir.ScanNode(
        originals=[ir.Tid(0)], sliced=[ir.Tid(2)], outputs=[ir.Tid(1)], carry=[], body_chain_idx=1, scan_axis=0
    )
    meta = ir.TensorMeta(shape=[ir.ShapeDim(value=3), ir.ShapeDim(value=2)], scalar_type=FLOAT32)
    graph = ir.MLXGraph(
        num_input_tensors=1,
        num_output_tensors=1,
        num_temp_tensors=1,
        instruction_chains=[ir.InstructionChain(instructions=[ir.Instruction(op=op)]) for op in (scan, body)],
        tensor_meta=[meta, meta],
    )
    ((listed,), _) = describe(Delegate("forward", 0, b"", graph), {})["chains"]
    assert {r["tensor"]: r["type"] for r in listed["results"]} == {1: "float32[3, 2]", 2: "float32[2]"}
