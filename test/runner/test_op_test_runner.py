"""The program `op_test_runner`: exit codes, messages, and the order of elements it writes."""

import subprocess

import pytest
import torch
from oprows import f32, floats, row, tensor_file
from oprows.lowering import lower
from oprows.program import PROGRAM

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="op_test_runner is not built")


def run(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    lowered = lower(row("permute_copy", torch.t, floats(2, 3), dtypes=[f32]))
    path = tmp_path_factory.mktemp("model") / "model.pte"
    path.write_bytes(lowered.pte)
    return path


def test_runs(model, tmp_path):
    x = torch.arange(6.0).reshape(2, 3)
    tensor_file.write_all(tmp_path / "in", [x])
    assert run(model, "--inputs", tmp_path / "in", "--outputs", tmp_path / "out") == (0, "")
    (actual,) = tensor_file.read_all(tmp_path / "out" / "0")
    assert torch.equal(actual, x.t())


@pytest.mark.parametrize("arguments, message", [
    ((), "are needed"),
    (("a.pte", "b.pte"), "one MODEL.pte"),
    (("a.pte", "--inputs"), "a value was expected"),
    (("a.pte", "--nonsense", "1"), "--nonsense"),
])
def test_wrong_command_line(arguments, message):
    code, errors = run(*arguments)
    assert code == 2 and message in errors and "usage:" in errors


def test_missing_model(tmp_path):
    tmp_path.joinpath("in").mkdir()
    code, errors = run(tmp_path / "no.pte", "--inputs", tmp_path / "in", "--outputs", tmp_path)
    assert code == 1 and "no.pte" in errors


def test_bad_input_files(model, tmp_path):
    call = (model, "--inputs", tmp_path / "in", "--outputs", tmp_path / "out")
    code, errors = run(*call)
    assert code == 1 and "no such folder" in errors
    tensor_file.write_all(tmp_path / "in", [torch.ones(2, 3)])
    file = tmp_path / "in" / "0.tensor"
    content = file.read_bytes()
    for broken, message in (
        (b"", "header"), (b"x" * 64, "not a .tensor"), (content[:-1], "bytes of elements"),
        (content[:8] + b"\xff" * 8 + content[16:], "ScalarType"),
    ):
        file.write_bytes(broken)
        code, errors = run(*call)
        assert code == 1 and message in errors


def test_wrong_shape(model, tmp_path):
    tensor_file.write_all(tmp_path / "in", [torch.ones(2, 4)])
    code, errors = run(model, "--inputs", tmp_path / "in", "--outputs", tmp_path / "out")
    assert code == 1 and "call 0" in errors
