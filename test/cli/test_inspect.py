"""What `inspect` shows of real files, and what it says of those that are none."""

import json
import shutil
import xml.etree.ElementTree as ElementTree

import pytest
from executorch_mlx.cli.main import main
from executorch_mlx.serialization.read import read_payload


@pytest.fixture
def inspect(capsys):
    def run(*arguments) -> tuple[int, str, str]:
        code = main(["inspect", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def tree(inspect, net) -> dict:
    code, out, _ = inspect(net, "--json")
    assert code == 0
    return json.loads(out)


def by_method(tree) -> dict[str, dict]:
    return {d["method"]: d for d in tree["delegates"]}


def test_json_counts(tree, net):
    assert tree["file"] == {"bytes": net.stat().st_size, "methods": ["branches", "forward"]}
    forward = by_method(tree)["forward"]
    weights = {t["name"]: t for t in forward["tensors"] if t["space"] == "constant"}
    assert weights["linear.weight"]["shape"] == [4, 8]
    assert weights["linear.weight"]["bytes"] == weights["linear.weight"]["stored_bytes"] == 4 * 8 * 4
    assert forward["constants"] == {"count": len(weights), "bytes": sum(t["bytes"] for t in weights.values())}
    assert forward["buffers"] == {"count": 1, "bytes": 16}
    assert forward["instructions"] == sum(forward["ops"].values()) == sum(map(len, forward["chains"]))
    assert {"Addmm", "Gelu", "Softmax"} <= forward["ops"].keys()


def test_a_dynamic_extent_has_its_bounds(tree):
    (x,) = [t for t in by_method(tree)["forward"]["tensors"] if t["space"] == "input"]
    assert (x["shape"], x["dtype"], x["bounds"]) == ([None, 8], "float32", [[0, 16], None])
    assert x["bytes"] == 16 * 8 * 4


def test_temporaries_have_types(tree):
    (chain,) = by_method(tree)["forward"]["chains"]
    made = {i["op"]: i["results"][0]["type"] for i in chain if i["results"]}
    assert made["Addmm"] == made["Gelu"] == made["Softmax"] == "float32[?, 4]"
    assert made["Transpose"] == "float32[8, 4]"


def test_peak_is_of_the_largest_batch(tree):
    temporaries = by_method(tree)["forward"]["temporaries"]
    assert temporaries["of_unknown_size"] == 0
    # Of the [16, 4] float32 one is made of another, two at a time; the new steps, [4], wait beside them.
    assert temporaries["peak_bytes"] == 2 * 16 * 4 * 4 + 4 * 4


def test_branches_are_chains(tree):
    branches = by_method(tree)["branches"]
    (taken,) = [i for chain in branches["chains"] for i in chain if i["op"] == "If"]
    assert len(taken["chains"]) == 2
    then, other = (branches["chains"][c] for c in taken["chains"])
    assert "Exp" in [i["op"] for i in then] and "Sin" in [i["op"] for i in other]
    for chain in branches["chains"]:
        for instruction in chain:
            assert "?" not in str([r["type"] for r in instruction["results"]])


def test_text_names_what_it_shows(inspect, net):
    code, out, _ = inspect(net)
    assert code == 0
    assert "linear.weight: float32[4, 8]" in out
    assert "x: float32[?, 8]" in out
    (line,) = [line for line in out.splitlines() if "Addmm(" in line]
    assert "float32[?, 4] = Addmm(mat1=x, mat2=" in line and "bias=linear.bias" in line


def test_summary_lists_no_instruction(inspect, net):
    _, out, _ = inspect(net, "--summary")
    assert "temporaries" in out and "Addmm(" not in out


def test_one_method(inspect, net):
    _, out, _ = inspect(net, "--json", "--method", "branches")
    assert by_method(json.loads(out)).keys() == {"branches"}


def test_payloads(inspect, net, tmp_path):
    code, out, _ = inspect(net, "--payload", tmp_path / "out")
    assert code == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [f.name for f in files] == ["branches.0.mlx", "forward.0.mlx"]
    assert all(f.name in out for f in files)
    graph = read_payload(files[1].read_bytes())
    assert graph.num_mutable_buffer_tensors == 1


def test_dot_has_every_instruction_and_edge(inspect, net, tree):
    code, out, _ = inspect(net, "--dot", "--method", "forward")
    assert code == 0 and out.startswith("digraph") and out.count("{") == out.count("}")
    forward = by_method(tree)["forward"]
    for instruction in forward["chains"][0]:
        assert f"d0_0_{instruction['index']} [label=\"{instruction['op']}" in out
    operands = sum("tensor" in v for i in forward["chains"][0] for v in i["operands"].values() if isinstance(v, dict))
    assert out.count(" -> ") == operands + len(forward["outputs"])


def test_svg_or_a_plain_word(inspect, net):
    code, out, err = inspect(net, "--svg")
    if shutil.which("dot") is None:
        assert code == 1 and "graphviz" in err and out == ""
    else:
        assert code == 0 and ElementTree.fromstring(out).tag.endswith("svg")


# -- files that are none ---------------------------------------------------------


def refused(inspect, path) -> str:
    code, out, err = inspect(path)
    assert code == 1 and out == "" and err.count("\n") == 1
    return err


def test_a_file_without_mlx(inspect, portable):
    assert "has no MLX delegate" in refused(inspect, portable)


def test_an_unknown_method(inspect, net):
    code, _, err = inspect(net, "--method", "backward")
    assert code == 1 and "no method backward" in err and "forward" in err


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4" * 100, bytes(4096)])
def test_no_pte(inspect, tmp_path, content):
    (tmp_path / "file.pte").write_bytes(content)
    assert "no .pte file" in refused(inspect, tmp_path / "file.pte")


def test_no_file(inspect, tmp_path):
    assert "nothing.pte" in refused(inspect, tmp_path / "nothing.pte")


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_a_file_cut_off(inspect, net, tmp_path, share):
    data = net.read_bytes()
    (tmp_path / "cut.pte").write_bytes(data[: int(len(data) * share)])
    error = refused(inspect, tmp_path / "cut.pte")
    assert "cut off" in error or "damaged" in error


def test_a_damaged_payload(inspect, net, tmp_path):
    data = net.read_bytes()
    assert data.count(b"MLX0") == 2
    (tmp_path / "bad.pte").write_bytes(data.replace(b"MLX0", b"MLX9"))
    assert "magic" in refused(inspect, tmp_path / "bad.pte")


def test_damage_anywhere_ends_in_a_sentence(inspect, net, tmp_path):
    """Bytes put out of order all over the file: a report or one line, never a traceback."""
    import random

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
