"""`mlx::int8_quantized_matmul`: the product of activations, rounded to 8 bits, and a packed matrix.

Each group of a row of the activations is rounded to integers from -127 to 127, with a scale of its own. The group size
is that of the matrix. The IR node `Int8QuantizedMatmulNode` has a kernel that multiplies the integers. Its results
differ from those of the torch code by the rounding of sums in float32.
"""

from __future__ import annotations

import torch

from ..custom_ops import quantized
from ..custom_ops.library import define
from ..custom_ops.packing import check

BITS = (4, 8)  # of the matrix
_SMALLEST = 2.0**-100  # a group whose largest magnitude is smaller is rounded to zeros


def rounded_to_int8(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return `x` [..., K] with each value rounded to a multiple of the scale of its group, float32.

    The scale is the largest magnitude of the group, divided by 127. Ties are rounded to even multiples. A group with an
    infinity or a NaN becomes NaN.
    """
    groups = x.to(torch.float32).unflatten(-1, (-1, group_size))
    largest = groups.abs().amax(-1, keepdim=True)
    is_zero = largest < _SMALLEST
    inverse = torch.where(is_zero, 0.0, torch.full_like(largest, 127) / largest)
    scale = torch.where(is_zero, 0.0, largest / 127)
    return ((groups * inverse).round() * scale).flatten(-2)


def int8_quantized_matmul_definition(x, w, scales, biases, group_size, bits):
    """Return the product of `x` [..., K] and the transpose of the matrix [N, K]: [..., N] in the dtype of `x`."""
    rounded = rounded_to_int8(x, group_size)
    return quantized.quantized_matmul(rounded, w, scales, biases, group_size, bits, "affine").to(x.dtype)


def _check(x, w, scales, biases, group_size, bits):
    check(w, scales, biases, group_size, bits, "affine")
    if bits not in BITS:
        raise ValueError(f"mlx::int8_quantized_matmul: bits: got {bits}, expected one of {BITS}")
    if x.shape[-1] != w.shape[-1] * 32 // bits or not x.is_floating_point():
        raise ValueError(
            f"mlx::int8_quantized_matmul: x: got {x.dtype} of shape {list(x.shape)}, expected floats of shape "
            f"[..., {w.shape[-1] * 32 // bits}]"
        )


def _eager(x, *operands):
    _check(x, *operands)
    return int8_quantized_matmul_definition(x, *operands)


def _fake(x, w, *packing):
    _check(x, w, *packing)
    return x.new_empty((*x.shape[:-1], w.shape[0]))


int8_quantized_matmul = define(
    "int8_quantized_matmul(Tensor x, Tensor w, Tensor scales, Tensor biases, int group_size, int bits) -> Tensor",
    _eager,
    _fake,
)

COMPOSITES = {int8_quantized_matmul: int8_quantized_matmul_definition}
