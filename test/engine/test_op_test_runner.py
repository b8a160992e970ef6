"""The program op_test_runner: exit status, messages, and the order of the elements that it writes."""

import subprocess

import pytest
import torch
from oprows import f32, floats, row, tensor_file
from oprows.lowering import lower
from oprows.runner import RUNNER

assert RUNNER.exists(), f"{RUNNER} is not built"


def run(*arguments):
    done = subprocess.run([RUNNER, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    lowered = lower(row("permute_copy", torch.t, floats(2, 3), dtypes=[f32]))
    path = tmp_path_factory.mktemp("model") / "model.pte"
    path.write_bytes(lowered.pte)
    return path


def test_output_is_row_major(model, tmp_path):
    x = torch.arange(6.0).reshape(2, 3)
    tensor_file.write_all(tmp_path / "in", [x])
    assert run(model, "--inputs", tmp_path / "in", "--outputs", tmp_path / "out") == (0, "")
    (actual,) = tensor_file.read_all(tmp_path / "out" / "0")
    assert torch.equal(actual, x.t())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "expected MODEL.pte, --inputs and --outputs"),
        (("a.pte", "b.pte"), "unexpected argument 'b.pte': the model is a.pte"),
        (("a.pte", "--inputs"), "--inputs: missing value"),
        (("a.pte", "--nonsense", "1"), "--nonsense: unknown option"),
    ],
)
def test_invalid_command_line_prints_usage(arguments, message):
    code, errors = run(*arguments)
    assert code == 2 and message in errors and "usage:" in errors


def test_missing_model_is_an_error(tmp_path):
    tmp_path.joinpath("in").mkdir()
    code, errors = run(tmp_path / "no.pte", "--inputs", tmp_path / "in", "--outputs", tmp_path)
    assert code == 1 and "no.pte" in errors


def test_invalid_input_files_are_errors(model, tmp_path):
    call = (model, "--inputs", tmp_path / "in", "--outputs", tmp_path / "out")
    code, errors = run(*call)
    assert code == 1 and f"{tmp_path / 'in'}: not a folder" in errors
    tensor_file.write_all(tmp_path / "in", [torch.ones(2, 3)])
    file = tmp_path / "in" / "0.tensor"
    content = file.read_bytes()
    for broken, message in (
        (b"", "incomplete header"),
        (b"x" * 64, "not a .tensor file"),
        (content[:-1], "got 23 bytes of elements, expected 24"),
        (content[:8] + b"\xff" * 8 + content[16:], "invalid header: ScalarType -1, rank -1"),
    ):
        file.write_bytes(broken)
        code, errors = run(*call)
        assert code == 1 and message in errors


def test_wrong_input_shape_is_an_error(model, tmp_path):
    tensor_file.write_all(tmp_path / "in", [torch.ones(2, 4)])
    code, errors = run(model, "--inputs", tmp_path / "in", "--outputs", tmp_path / "out")
    assert code == 1 and "forward: call 0: Error::NotSupported, see the log for details" in errors
