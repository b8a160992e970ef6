"""Quantized weights as torchao and ExecuTorch spell them, in MLX's packing.

A weight has `dtype`, that of the numbers it stands for, `packs`, and `operands`, what MLX's
quantized instructions take; where it has a `factor`, the numbers are to be multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..packing import FLOAT_MODES, pack, unpack
from ..serialization import ir
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
    factor = None

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
        constant = _are_constants(*(s for s in (self.q, self.scale, self.zero_point) if s is not None))
        return constant and None not in (self.bits, self.group_size)

    def operands(self, P, dtype: torch.dtype) -> dict:
        """All computed at serialization. `w`: uint32 [N, K * bits / 32]; `scales`, `biases`: `dtype`
        [N, K / group_size]; MLX has w = scale * q + bias with q counted from 0."""
        rows, columns = self.q.shape
        groups = (rows, columns // self.group_size)

        def scales() -> torch.Tensor:
            if self.scale is None:
                return torch.ones(groups)
            return _spread(self.scale.data().float(), self, groups)

        def biases() -> torch.Tensor:
            if self.zero_point is None:
                return self.low * scales()
            return (self.low - _spread(self.zero_point.data().float(), self, groups)) * scales()

        def words() -> torch.Tensor:
            return pack((self.q.data().to(torch.int16) - self.low).to(torch.uint8), self.bits)

        return {
            "w": P.constant(f"{self.q.name}.packed", words, (rows, columns * self.bits // 32), torch.uint32),
            "scales": P.constant(f"{self.q.name}.scales", lambda: scales().to(dtype), groups, dtype),
            "biases": P.constant(f"{self.q.name}.biases", lambda: biases().to(dtype), groups, dtype),
            "group_size": self.group_size,
            "bits": self.bits,
            "mode": "affine",
        }


@dataclass(frozen=True)
class Microscaled:
    """A matrix [N, K] of floats of a few bits, in blocks with a scale of a byte: `mode` is MLX's.

    `elements`: the bytes of a row; `scale`: [N, K / block]; `factor`: of them all, 0-d, or None. All
    are constants.
    """

    elements: TensorSlot
    scale: TensorSlot
    factor: TensorSlot | None
    block: int
    mode: str | None
    dtype: torch.dtype

    @property
    def packs(self) -> bool:
        """Whether MLX has the mode."""
        return self.mode is not None and FLOAT_MODES[self.mode][1] == self.block

    def operands(self, P, dtype: torch.dtype) -> dict:
        """The same bytes, whatever `dtype` the product has."""
        bits, group_size = FLOAT_MODES[self.mode]
        rows, groups = self.elements.shape[0], self.scale.shape[-1]

        def octets(t: TensorSlot) -> torch.Tensor:
            return t.data().detach().contiguous().view(torch.uint8).reshape(rows, -1)

        shape = (rows, groups * group_size * bits // 32)
        return {
            "w": P.constant(
                f"{self.elements.name}.packed", lambda: octets(self.elements).view(torch.uint32), shape, torch.uint32
            ),
            "scales": P.constant(f"{self.scale.name}.octets", lambda: octets(self.scale), (rows, groups), torch.uint8),
            "biases": None,
            "group_size": group_size,
            "bits": bits,
            "mode": self.mode,
        }


def affine(
    P, input, block_size, scale, zero_point, input_dtype, quant_min, quant_max, output_dtype
) -> Affine | None:
    """The arguments of `torchao::dequantize_affine`, if they describe blocks of a matrix."""
    if input is None or scale is None or input.ndim != 2:
        return None
    if zero_point is not None and zero_point.dtype.is_floating_point:
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


def int4(P, qdata, scale, zero_point, group_size, output_dtype) -> Affine | None:
    """Those of `torchao::dequantize_int4_tensor`: two numbers from 0 to 15 in a byte, [N, K / 2], the
    lower half first; scales and zero points, of a float dtype perhaps, [K / group_size, N]."""
    if not _are_constants(qdata, scale, zero_point):
        return None
    rows, columns = qdata.shape[0], qdata.shape[1] * 2
    groups = (rows, columns // group_size)

    def turned(t: TensorSlot) -> TensorSlot:
        return P.constant(f"{t.name}.turned", lambda: t.data().detach().t(), groups, t.dtype)

    def numbers() -> torch.Tensor:
        return unpack(qdata.data().detach(), 4)

    q = P.constant(f"{qdata.name}.numbers", numbers, (rows, columns), torch.uint8)
    block = (1, group_size)
    return Affine(q, turned(scale), turned(zero_point), block, 0, 15, result_dtype(output_dtype))


def nvfp4(P, qdata, scale, per_tensor_scale, block_size, output_dtype) -> Microscaled | None:
    """Those of `torchao::dequantize_nvfp4`: E2M1 in words, scales E4M3."""
    if not _are_constants(qdata, scale, per_tensor_scale):
        return None
    dtype = result_dtype(output_dtype)
    return Microscaled(qdata, scale, per_tensor_scale, block_size, "nvfp4", dtype)


def mx(P, qdata, scale, elem_dtype, block_size, output_dtype) -> Microscaled | None:
    """Those of `torchao::dequantize_mx`: one element in a byte, scales E8M0."""
    if not _are_constants(qdata, scale):
        return None
    mode = "mxfp8" if elem_dtype == torch.float8_e4m3fn else None
    return Microscaled(qdata, scale, None, block_size, mode, result_dtype(output_dtype))


# What turns a quantized weight into floats. All but the first are defined by `executorch.extension.llm`
# where it is imported: they go by their names.
DEQUANTIZE = {
    "torchao.dequantize_affine.default": affine,
    "torchao.dequantize_int4_tensor.default": int4,
    "torchao.dequantize_nvfp4.default": nvfp4,
    "torchao.dequantize_mx.default": mx,
}


def scaled(P, y: TensorSlot, factor: TensorSlot | None, dtype: torch.dtype) -> TensorSlot:
    """`y` times the factor of a weight, if there is one, in `dtype`; the product is of float32."""
    if factor is not None:
        y = P.emit(ir.MultiplyNode, a=P.cast(y, torch.float32), b=P.cast(factor, torch.float32))
    return P.cast(y, dtype)


def dequantized(P, weight: Affine | Microscaled, rows: dict | None = None, shape=None) -> TensorSlot:
    """A weight in floats of its dtype, or some `rows` of it, operands that make up `shape`."""
    # In float32: MLX would round q * scale to a half type before it adds the bias. Where the scales
    # are bytes it makes bfloat16, exactly.
    operands = weight.operands(P, torch.float32) if rows is None else rows
    made = torch.float32 if operands["mode"] == "affine" else torch.bfloat16
    w = P.emit(ir.DequantizeNode, **operands, dtype=made)
    w.shape = tuple(P.out.shape) if shape is None else shape
    return scaled(P, w, weight.factor, weight.dtype)


def _are_constants(*slots: TensorSlot | None) -> bool:
    return all(s is not None and s.space == Space.CONSTANT for s in slots)


def _spread(t: torch.Tensor, a: Affine, groups: tuple[int, int]) -> torch.Tensor:
    """A number for each block → one for each row and group."""
    rows, columns = a.block
    t = t.detach().reshape(groups[0] // rows, -1)
    return t.repeat_interleave(rows, 0).repeat_interleave(columns // a.group_size, 1).contiguous()
