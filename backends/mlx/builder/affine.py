"""Weights that torchao has quantized, in MLX's packing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..packing import pack
from .dtypes import SCALAR_TYPES
from .slots import Space, TensorSlot

GROUP_SIZES = (128, 64, 32)
BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Affine:
    """What torchao says of a matrix [N, K]: (q - zero_point) * scale, block by block.

    `q`: [N, K] integers in [low, high]; `scale`, `zero_point`: one number for each block of
    `block` = (rows, columns); `zero_point` may be None. `dtype`: that of the result.
    """

    q: TensorSlot
    scale: TensorSlot | None
    zero_point: TensorSlot | None
    block: tuple[int, int]
    low: int
    high: int
    dtype: torch.dtype

    @property
    def bits(self) -> int | None:
        """The narrowest width that MLX has for the range."""
        return next((b for b in BITS if self.high - self.low < 2**b), None)

    @property
    def group_size(self) -> int | None:
        """The widest group that MLX has and that does not cross a block."""
        return next((g for g in GROUP_SIZES if self.block[1] % g == 0), None)

    @property
    def packs(self) -> bool:
        """Whether MLX has a packing for it; the data must be constants."""
        slots = [s for s in (self.q, self.scale, self.zero_point) if s is not None]
        whole = self.zero_point is None or not self.zero_point.dtype.is_floating_point
        constant = all(s.space == Space.CONSTANT for s in slots)
        return constant and whole and None not in (self.bits, self.group_size)


def affine(
    input, block_size, scale, zero_point, input_dtype, quant_min, quant_max, output_dtype
) -> Affine | None:
    """The arguments of `dequantize_affine`, if they describe blocks of a matrix."""
    if input is None or scale is None or input.ndim != 2:
        return None
    if not all(isinstance(n, int) for n in (*input.shape, *block_size)):
        return None
    if input.dtype not in (torch.int8, torch.uint8):
        return None
    limits = torch.iinfo(input.dtype)
    low = limits.min if quant_min is None else int(quant_min)
    high = limits.max if quant_max is None else int(quant_max)
    return Affine(input, scale, zero_point, tuple(block_size), low, high, result_dtype(output_dtype))


def result_dtype(dtype: torch.dtype | int) -> torch.dtype:
    """The default of a schema is a number."""
    return next((d for d, number in SCALAR_TYPES.items() if number == dtype), dtype)


def packed(P, a: Affine, dtype: torch.dtype) -> dict:
    """The operands of MLX's quantized instructions, computed at serialization.

    `w`: uint32 [N, K * bits / 32]; `scales`, `biases`: `dtype` [N, K / group_size].
    MLX has w = scale * q + bias with q counted from 0.
    """
    rows, columns = a.q.shape
    groups = (rows, columns // a.group_size)

    def scales() -> torch.Tensor:
        if a.scale is None:
            return torch.ones(groups)
        return _spread(a.scale.data().float(), a, groups)

    def biases() -> torch.Tensor:
        if a.zero_point is None:
            return a.low * scales()
        return (a.low - _spread(a.zero_point.data().float(), a, groups)) * scales()

    def constant(kind, data, shape, dtype):
        like = torch.empty(shape, dtype=dtype, device="meta")
        return P.constant(f"{a.q.name}.{kind}", data, like=like)

    return {
        "w": constant(
            "packed",
            lambda: pack((a.q.data().to(torch.int16) - a.low).to(torch.uint8), a.bits),
            (rows, columns * a.bits // 32),
            torch.uint32,
        ),
        "scales": constant("scales", lambda: scales().to(dtype), groups, dtype),
        "biases": constant("biases", lambda: biases().to(dtype), groups, dtype),
        "group_size": a.group_size,
        "bits": a.bits,
        "mode": "affine",
    }


def _spread(t: torch.Tensor, a: Affine, groups: tuple[int, int]) -> torch.Tensor:
    """A number for each block → one for each row and group."""
    rows, columns = a.block
    t = t.detach().reshape(groups[0] // rows, -1)
    return t.repeat_interleave(rows, 0).repeat_interleave(columns // a.group_size, 1).contiguous()
