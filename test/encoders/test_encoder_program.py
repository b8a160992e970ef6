"""The C API for programs of any kind, `program.h`, and its declarations in Python."""

import ctypes
import re
from ctypes import POINTER
from pathlib import Path

import numpy as np
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.encoders import program as binding
from executorch_mlx.encoders.program import ArrayProgram

INCLUDE = Path(__file__).parents[2] / "backends" / "mlx" / "engine" / "include" / "executorch_mlx"
HEADER = re.sub(r"//[^\n]*", "", "".join((INCLUDE / name).read_text() for name in ("array.h", "program.h")))
TYPES = {
    "executorch_mlx_status": ctypes.c_int32,
    "void": None,
    "const char*": ctypes.c_char_p,
    "const void*": ctypes.c_void_p,
    "const void**": POINTER(ctypes.c_void_p),
    "executorch_mlx_program*": ctypes.c_void_p,
    "const executorch_mlx_program*": ctypes.c_void_p,
    "executorch_mlx_program**": POINTER(ctypes.c_void_p),
    "const executorch_mlx_array*": POINTER(binding.Array),
    "executorch_mlx_array*": POINTER(binding.Array),
    "int64_t*": POINTER(ctypes.c_int64),
    "size_t*": POINTER(ctypes.c_size_t),
    "double*": POINTER(ctypes.c_double),
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
}


def test_declarations_are_those_of_the_header():
    found = re.findall(r"^([\w ]+\**)\s*executorch_mlx_program_(\w+)\(([^)]*)\);", HEADER, re.MULTILINE)
    declared = {
        name: (TYPES[result.strip()], [TYPES[part.rpartition(" ")[0].strip()] for part in parts.split(",")])
        for result, name, parts in found
    }
    assert declared == binding.FUNCTIONS
    (body,) = re.findall(r"typedef struct \{(.*?)\} executorch_mlx_array;", HEADER, re.DOTALL)
    fields = [re.fullmatch(r"\s*(.+?)(\w+)(\[8\])?", line).groups() for line in body.split(";")[:-1]]
    named = {"int64_t": ctypes.c_int64, **TYPES}
    expected = [(name, named[kind.strip()] * 8 if many else named[kind.strip()]) for kind, name, many in fields]
    assert expected == binding.Array._fields_
    numbers = dict(re.findall(r"EXECUTORCH_MLX_(\w+) = (\d+)", HEADER))
    assert int(numbers.pop("MAX_RANK")) == binding.MAX_RANK and int(numbers.pop("BFLOAT16")) == binding._BFLOAT16
    assert {int(number): name.lower() for name, number in numbers.items()} == binding._DTYPES


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    class Model(torch.nn.Module):
        def forward(self, x, n):
            return x * 2 + n, (x > 0).sum(), x.to(torch.bfloat16)

    rows = torch.export.Dim("rows", min=1, max=8)
    shapes = ({0: rows}, None)
    exported = torch.export.export(Model(), (torch.randn(3, 4), torch.ones(4)), dynamic_shapes=shapes)
    lowered = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()], constant_methods={"get_size": 4})
    path = tmp_path_factory.mktemp("program") / "model.pte"
    lowered.to_executorch().save(str(path))
    return ArrayProgram(path)


def test_arrays_in_and_out(program):
    assert program.methods == ("forward", "get_size") and program.get("get_size") == 4
    assert program.get("other", 7) == 7 and program.data("other") is None
    for rows in (1, 8, 3):
        x = np.linspace(-1, 1, rows * 4, dtype=np.float32).reshape(rows, 4)
        doubled, count, half = program.call("forward", [x, np.ones(4, np.float32)], 3)
        assert np.allclose(doubled, x * 2 + 1) and count == (x > 0).sum() and count.dtype == np.int64
        assert half.dtype == np.float32 and np.abs(half - x).max() < 1e-2
    transposed = np.asfortranarray(x)
    assert (program.call("forward", [transposed, np.ones(4, np.float32)], 3)[0] == doubled).all()


@pytest.mark.parametrize(
    "method, inputs, outputs, message",
    [
        ("other", [], 1, "method: got other, expected one of forward, get_size"),
        ("forward", [], 3, "forward: got 0 inputs, expected 2"),
        ("forward", [np.ones((1, 4), np.float32), np.ones(4, np.float32)], 1, "forward: got room for 1 outputs"),
        ("forward", [np.ones((9, 4), np.float32), np.ones(4, np.float32)], 3, "forward: input 0: got Float [9, 4]"),
        ("forward", [np.ones((1, 4), np.float64), np.ones(4, np.float32)], 3, "forward: input 0: got Double [1, 4]"),
        ("forward", [np.ones(4, np.float32), np.ones(4, np.float32)], 3, "forward: input 0: got Float [4], expected"),
        ("forward", [np.ones((1, 4), "U1"), np.ones(4, np.float32)], 3, "inputs: got <U1 of rank 2"),
    ],
)
def test_wrong_calls(program, method, inputs, outputs, message):
    with pytest.raises(ValueError) as error:
        program.call(method, inputs, outputs)
    assert str(error.value).startswith(message)


def test_closed_and_other_files(program, tmp_path):
    other = ArrayProgram(program.path)
    other.close()
    other.close()
    with pytest.raises(RuntimeError, match="is closed"):
        other.get("get_size")
    (tmp_path / "text.pte").write_text("no program at all, but long enough to be one")
    with pytest.raises(ValueError, match="not an ExecuTorch program"):
        ArrayProgram(tmp_path / "text.pte")
    with pytest.raises(FileNotFoundError):
        ArrayProgram(tmp_path / "missing.pte")
    with pytest.raises(ValueError, match="device: got 'tpu', expected cpu or gpu"):
        ArrayProgram(program.path, device="tpu")
