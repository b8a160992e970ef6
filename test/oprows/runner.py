"""Runs an op row in the C++ program `op_test_runner`."""

from __future__ import annotations

import shutil
import subprocess

from cpp_programs import PROGRAMS

from . import tensor_file
from .check import Failure, compare
from .lowering import lower
from .row import OpRow

RUNNER = PROGRAMS / "op_test_runner"
FOLDER = PROGRAMS / "op_tests"
_TIMEOUT = 120  # seconds


def run_in_runner(row: OpRow) -> None:
    """Lower an op row, run it and compare the results. Raises Failure.

    The files stay in build/op_tests/<op row>: model.pte, the inputs, and the expected and actual outputs.
    """
    folder = FOLDER / row.slug
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lowered = lower(row)
    model = folder / "model.pte"
    model.write_bytes(lowered.pte)
    command = [RUNNER, model, "--outputs", folder / "outputs"]
    for call, (inputs, expected) in enumerate(lowered.calls):
        tensor_file.write_all(folder / "inputs" / str(call), inputs)
        tensor_file.write_all(folder / "expected" / str(call), expected)
        command += ["--inputs", folder / "inputs" / str(call)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Failure(f"op_test_runner: no result within {_TIMEOUT} s") from None
    if done.returncode != 0:
        raise Failure(f"op_test_runner: exit code {done.returncode}\n{done.stderr[-2000:]}")
    for call, (_, expected) in enumerate(lowered.calls):
        compare(row, call, tensor_file.read_all(folder / "outputs" / str(call)), expected)
