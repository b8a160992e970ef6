"""Reads and writes tensor files, whose format `op_test_runner.cpp` explains."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from executorch_mlx.builder.dtypes import SCALAR_TYPES

_MAGIC = b"MLXTNSR\0"
_HEADER = struct.Struct("<8sii")
_DTYPES = {number: dtype for dtype, number in SCALAR_TYPES.items()}


def write(path: Path, tensor: torch.Tensor) -> None:
    # A copy: `contiguous()` keeps the strides of a tensor of one element, and `view` wants the stride 1.
    tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    sizes = struct.pack(f"<{tensor.ndim}q", *tensor.shape)
    path.write_bytes(_HEADER.pack(_MAGIC, SCALAR_TYPES[tensor.dtype], tensor.ndim) + sizes + raw)


def read(path: Path) -> torch.Tensor:
    content = path.read_bytes()
    magic, scalar_type, rank = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise ValueError(f"{path}: not a .tensor file")
    shape = struct.unpack_from(f"<{rank}q", content, _HEADER.size)
    dtype, raw = _DTYPES[scalar_type], bytearray(content[_HEADER.size + 8 * rank :])
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def write_all(folder: Path, tensors: Sequence[torch.Tensor]) -> None:
    """Write 0.tensor, 1.tensor, … to a new folder."""
    folder.mkdir(parents=True)
    for i, tensor in enumerate(tensors):
        write(folder / f"{i}.tensor", tensor)


def read_all(folder: Path) -> list[torch.Tensor]:
    """Read 0.tensor, 1.tensor, … in `folder`."""
    count = len(list(folder.glob("*.tensor")))
    return [read(folder / f"{i}.tensor") for i in range(count)]
