"""Conversions between bytes, torch tensors and MLX arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import torch
from executorch_mlx.builder.dtypes import SCALAR_TYPES

TORCH_DTYPES = {number: dtype for dtype, number in SCALAR_TYPES.items()}
"""From the number of a ScalarType, as files have it, to torch's dtype."""

MLX_DTYPES = {
    number: getattr(mx, str(dtype).removeprefix("torch.") + ("_" if dtype == torch.bool else ""))
    for number, dtype in TORCH_DTYPES.items()
}
"""From the number of a ScalarType to MLX's dtype."""

HALF = (mx.float16, mx.bfloat16)


def from_bytes(data: bytes | memoryview, shape: Sequence[int], scalar_type: int) -> mx.array:
    """Return the array with these bytes, which are in row-major order."""
    dtype = MLX_DTYPES[scalar_type]
    if math.prod(shape) == 0:
        return mx.zeros(shape, dtype)
    array = mx.array(np.frombuffer(data, np.uint8))
    return array.view(dtype).reshape(shape)


def to_bytes(array: mx.array) -> bytes:
    """Return the elements in row-major order."""
    if array.size == 0:
        return b""
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


def from_torch(tensor: torch.Tensor) -> mx.array:
    tensor = tensor.detach().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return from_bytes(data, tensor.shape, SCALAR_TYPES[tensor.dtype])


def to_torch(array: mx.array) -> torch.Tensor:
    scalar_type = next(number for number, dtype in MLX_DTYPES.items() if dtype == array.dtype)
    dtype = TORCH_DTYPES[scalar_type]
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(to_bytes(array)), dtype=dtype).reshape(array.shape)


def strides_in(array: mx.array) -> tuple[int, ...]:
    """Return the strides of an evaluated array in memory, in elements."""
    view = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return tuple(stride // array.itemsize for stride in memoryview(view).strides)


def is_row_major(array: mx.array) -> bool:
    """Whether the elements of an evaluated array lie in memory in row-major order, without gaps."""
    expected = 1
    for size, stride in zip(reversed(array.shape), reversed(strides_in(array))):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
