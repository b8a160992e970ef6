"""The C++ program `op_test_runner`: its command line, and the tensor files that it reads and writes.

`op_test_runner.cpp` explains the files. `oprows.tensor_file` needs ExecuTorch's Python package, which the GPU machine
lacks.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

DTYPES = {  # ExecuTorch's numbers of the dtypes
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    9: torch.complex64,
    11: torch.bool,
    15: torch.bfloat16,
    27: torch.uint16,
    28: torch.uint32,
    29: torch.uint64,
}
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def write(path: Path, array: np.ndarray) -> None:
    number = NUMBERS[torch.from_numpy(array).dtype]
    header = struct.pack(f"<8sii{array.ndim}q", b"MLXTNSR\0", number, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def read(path: Path) -> torch.Tensor:
    content = path.read_bytes()
    _, number, rank = struct.unpack_from("<8sii", content)
    shape = struct.unpack_from(f"<{rank}q", content, 16)
    raw = bytearray(content[16 + 8 * rank :])
    return (
        torch.frombuffer(raw, dtype=DTYPES[number]).reshape(shape) if raw else torch.empty(shape, dtype=DTYPES[number])
    )


def command(program: str | Path, inputs: Sequence[Path], outputs: Path, method: str = "forward") -> list[str | Path]:
    """Return the command that calls a method of a program once for each folder of inputs."""
    runner = Path(os.environ["EXECUTORCH_MLX_BUILD"]) / "op_test_runner"
    folders = (part for each in inputs for part in ("--inputs", each))
    return [runner, program, "--method", method, "--outputs", outputs, *folders]


def run(program: str | Path, inputs: Sequence[Path], device: str, folder: Path) -> list[list[torch.Tensor]]:
    """Call a program once for each folder of inputs. Return the results of each call."""
    outputs = folder / device
    environment = os.environ | {"EXECUTORCH_MLX_DEVICE": device}
    subprocess.run(command(program, inputs, outputs), env=environment, check=True)
    counts = (len(list((outputs / str(call)).iterdir())) for call in range(len(inputs)))
    return [[read(outputs / str(call) / f"{i}.tensor") for i in range(count)] for call, count in enumerate(counts)]
