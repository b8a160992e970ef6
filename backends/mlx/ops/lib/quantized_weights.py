"""Quantized weights of torchao, PT2E and ExecuTorch, repacked for MLX.

A `read_*` function takes the arguments of a dequantize operator and describes the weight as an `Affine` or a
`Microscaled` matrix. Both classes have these members:

- `dtype`: the dtype of the dequantized values.
- `can_pack`: whether MLX has a packing for the matrix.
- `packed_fields`: the fields of MLX's quantized instructions for the packed matrix.
- `product_dtype`: the dtype in which to multiply by the packed matrix.
- `factor`: None, or the slot of a scalar by which the values that MLX dequantizes must be multiplied.

`P` is the `Lowering`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ...builder.dtypes import SCALAR_TYPES
from ...builder.emitter import Emitter
from ...builder.registry import Unsupported
from ...builder.slots import Space, TensorSlot
from ...custom_ops.packing import FLOAT_MODES, pack, unpack
from ...serialization import ir

GROUP_SIZES = (128, 64, 32)
BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Affine:
    """A matrix [N, K] of values (q - zero_point) * scale, with a scale and a zero point per block.

    `q` [N, K] holds integers in [low, high]. A block has `block[0]` rows and `block[1]` columns. `scale` and
    `zero_point` have one element for each block. A `scale` of None stands for 1, and a `zero_point` of None for 0.
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
        """The smallest width in `BITS` that holds the range [low, high], or None if there is none."""
        return next((b for b in BITS if self.high - self.low < 2**b), None)

    @property
    def lowest(self) -> int:
        """The integer that becomes 0 in MLX's packing, at most `low`.

        If possible, it is a power of two with a minus sign. Its product with a scale is then exact in half precision.
        Otherwise, the product would be rounded, and all values of a block would have the same error.
        """
        power = -(2 ** (self.bits - 1))
        return power if power <= self.low and self.high < -power else self.low

    @property
    def group_size(self) -> int | None:
        """The largest size in `GROUP_SIZES` that divides the columns of a block, or None if there is none."""
        return next((g for g in GROUP_SIZES if self.block[1] % g == 0), None)

    @property
    def can_pack(self) -> bool:
        """Whether MLX has a packing for the matrix, and `q`, `scale` and `zero_point` are constants."""
        constant = _are_constants(*(s for s in (self.q, self.scale, self.zero_point) if s is not None))
        return constant and None not in (self.bits, self.group_size)

    def packed_fields(self, P, dtype: torch.dtype) -> dict:
        """Return the fields `w`, `scales`, `biases`, `group_size`, `bits` and `mode` of a quantized instruction.

        `w` is uint32 [N, K * bits / 32]. `scales` and `biases` are `dtype` [N, K / group_size]. MLX computes
        scale * w + bias with values of `w` that start at 0, so `lowest` is subtracted from `q`. The weight is packed
        when the program is serialized.
        """
        rows, columns = self.q.shape

        def words() -> torch.Tensor:
            return pack((self.q.data().to(torch.int16) - self.lowest).to(torch.uint8), self.bits)

        return {
            "w": P.constant(f"{self.q.name}.packed", words, (rows, columns * self.bits // 32), torch.uint32),
            "scales": P.constant(f"{self.q.name}.scales", lambda: self._scales().to(dtype), self._groups, dtype),
            "biases": P.constant(f"{self.q.name}.biases", lambda: self._biases(dtype).to(dtype), self._groups, dtype),
            "group_size": self.group_size,
            "bits": self.bits,
            "mode": "affine",
        }

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return `dtype` if it holds the scales and biases, else float32.

        Scales may be rounded as other numbers are, because the biases are computed from the rounded scales.
        """
        rtol = torch.finfo(dtype).eps
        return affine_product_dtype(dtype, self._scales, lambda: self._biases(dtype), scales_rtol=rtol)

    @property
    def _groups(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1] // self.group_size

    def _scales(self) -> torch.Tensor:
        """Return the scales of the groups in float32."""
        return torch.ones(self._groups) if self.scale is None else self._per_group(self.scale)

    def _biases(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the biases in float32 that belong to scales of `dtype`."""
        zero_points = 0 if self.zero_point is None else self._per_group(self.zero_point)
        return (self.lowest - zero_points) * self._scales().to(dtype).float()

    def _per_group(self, per_block: TensorSlot) -> torch.Tensor:
        """Return `per_block`, which has one element for each block, with one element for each group, in float32."""
        rows, columns = self.block
        values = per_block.data().detach().float().reshape(self._groups[0] // rows, -1)
        return values.repeat_interleave(rows, 0).repeat_interleave(columns // self.group_size, 1).contiguous()


@dataclass(frozen=True)
class Microscaled:
    """A matrix [N, K] of 4-bit or 8-bit floats, with an 8-bit scale for each `block` values of a matrix row.

    `elements` [N, …] holds the bytes of each matrix row, and `scale` [N, K / block] the scales. `factor` is a 0-d
    tensor by which the whole matrix is multiplied, or None. `mode` is MLX's name of the format, or None if MLX lacks
    the format. All tensors are constants.
    """

    elements: TensorSlot
    scale: TensorSlot
    factor: TensorSlot | None
    block: int
    mode: str | None
    dtype: torch.dtype

    @property
    def can_pack(self) -> bool:
        """Whether MLX has the format with this block size."""
        return self.mode is not None and FLOAT_MODES[self.mode][1] == self.block

    def packed_fields(self, P, dtype: torch.dtype) -> dict:
        """Return the fields `w`, `scales`, `biases`, `group_size`, `bits` and `mode` of a quantized instruction.

        `w` is uint32 [N, K * bits / 32], `scales` is uint8 [N, K / block], and `biases` is None. `dtype` has no effect:
        it exists because `Affine.packed_fields` has it.
        """
        bits, group_size = FLOAT_MODES[self.mode]
        rows, groups = self.elements.shape[0], self.scale.shape[-1]

        def bytes_of(t: TensorSlot) -> torch.Tensor:
            return t.data().detach().contiguous().view(torch.uint8).reshape(rows, -1)

        shape = (rows, groups * group_size * bits // 32)
        return {
            "w": P.constant(
                f"{self.elements.name}.packed", lambda: bytes_of(self.elements).view(torch.uint32), shape, torch.uint32
            ),
            "scales": P.constant(f"{self.scale.name}.bytes", lambda: bytes_of(self.scale), (rows, groups), torch.uint8),
            "biases": None,
            "group_size": group_size,
            "bits": bits,
            "mode": self.mode,
        }

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return `dtype`, or float32 for a matrix with a factor and float16: the product without it may be infinite."""
        return torch.float32 if self.factor is not None and dtype == torch.float16 else dtype


def read_affine(
    P, input, block_size, scale, zero_point, input_dtype, quant_min, quant_max, output_dtype
) -> Affine | None:
    """Describe the arguments of `torchao::dequantize_affine`.

    Returns None unless `input` is a matrix of 8-bit integers with static extents and the zero points are integers.
    """
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
    return Affine(input, scale, zero_point, tuple(block_size), low, high, torch_dtype(output_dtype))


def torch_dtype(dtype: torch.dtype | int) -> torch.dtype:
    """Return a dtype argument as a torch dtype. `dtype` may be a number, as in the default value of a schema."""
    return next((d for d, number in SCALAR_TYPES.items() if number == dtype), dtype)


def read_int4(P: Emitter, qdata, scale, zero_point, group_size, output_dtype) -> Affine | None:
    """Describe the arguments of `torchao::dequantize_int4_tensor`. Returns None unless all tensors are constants.

    `qdata` [N, K / 2] holds two integers in [0, 15] per byte, the first in the low half. `scale` and `zero_point` are
    [K / group_size, N]. The zero points may be floats.
    """
    if not _are_constants(qdata, scale, zero_point):
        return None
    rows, columns = qdata.shape[0], qdata.shape[1] * 2
    groups = (rows, columns // group_size)

    def transposed(t: TensorSlot) -> TensorSlot:
        return P.constant(f"{t.name}.turned", lambda: t.data().detach().t(), groups, t.dtype)

    def unpacked() -> torch.Tensor:
        return unpack(qdata.data().detach(), 4)

    q = P.constant(f"{qdata.name}.numbers", unpacked, (rows, columns), torch.uint8)
    block = (1, group_size)
    return Affine(q, transposed(scale), transposed(zero_point), block, 0, 15, torch_dtype(output_dtype))


def read_nvfp4(P: Emitter, qdata, scale, per_tensor_scale, block_size, output_dtype) -> Microscaled | None:
    """Describe the arguments of `torchao::dequantize_nvfp4`. Returns None unless all tensors are constants.

    `qdata` holds two E2M1 elements per byte, and `scale` holds E4M3 scales.
    """
    if not _are_constants(qdata, scale, per_tensor_scale):
        return None
    dtype = torch_dtype(output_dtype)
    return Microscaled(qdata, scale, per_tensor_scale, block_size, "nvfp4", dtype)


def read_mx(P: Emitter, qdata, scale, elem_dtype, block_size, output_dtype) -> Microscaled | None:
    """Describe the arguments of `torchao::dequantize_mx`. Returns None unless all tensors are constants.

    `qdata` holds one element per byte, and `scale` holds E8M0 scales. MLX has no format for elements other than E4M3.
    """
    if not _are_constants(qdata, scale):
        return None
    mode = "mxfp8" if elem_dtype == torch.float8_e4m3fn else None
    return Microscaled(qdata, scale, None, block_size, mode, torch_dtype(output_dtype))


def read_per_channel(P, input, scales, zero_points, axis, quant_min, quant_max, dtype, out_dtype) -> Affine | None:
    """Describe the arguments of `quantized_decomposed::dequantize_per_channel`.

    Returns None if `axis` is not axis 0, or for the same reasons as `read_affine`.
    """
    if input is None or input.ndim != 2 or axis not in (0, -2):
        return None
    block = (1, input.shape[1])
    return read_affine(P, input, block, scales, zero_points, dtype, quant_min, quant_max, out_dtype or torch.float32)


def read_per_tensor(P, input, scale, zero_point, quant_min, quant_max, dtype, out_dtype) -> Affine | None:
    """Describe the arguments of `quantized_decomposed::dequantize_per_tensor`, with numbers as scale and zero point.

    Returns None for the same reasons as `read_affine`.
    """
    if input is None or input.ndim != 2:
        return None
    scale, zero_point = P.scalar(scale, torch.float32), P.scalar(zero_point, torch.int32)
    block = tuple(input.shape)
    return read_affine(P, input, block, scale, zero_point, dtype, quant_min, quant_max, out_dtype or torch.float32)


# The operators that dequantize a weight, and for each the function that reads the arguments. The operators are given by
# name, because all but the first are defined only when other packages are imported: torchao's by
# `executorch.extension.llm`, the others by torch's quantization.
DEQUANTIZE = {
    "torchao.dequantize_affine.default": read_affine,
    "quantized_decomposed.dequantize_per_channel.default": read_per_channel,
    "quantized_decomposed.dequantize_per_tensor.default": read_per_tensor,
    "torchao.dequantize_int4_tensor.default": read_int4,
    "torchao.dequantize_nvfp4.default": read_nvfp4,
    "torchao.dequantize_mx.default": read_mx,
}


def apply_factor(P: Emitter, y: TensorSlot, factor: TensorSlot | None, dtype: torch.dtype) -> TensorSlot:
    """Multiply `y` by `factor` in float32, unless `factor` is None, and cast the result to `dtype`."""
    if factor is not None:
        y = P.emit(ir.MultiplyNode, a=P.cast(y, torch.float32), b=P.cast(factor, torch.float32))
    return P.cast(y, dtype)


def dequantize(P: Emitter, weight: Affine | Microscaled, fields: dict | None = None) -> TensorSlot:
    """Return the dequantized weight: all matrix rows, or those of `fields`, the packed fields for some rows."""
    # MLX dequantizes to the dtype of the scales. If the scales are bytes, MLX dequantizes to bfloat16, which holds
    # every such value exactly. Other scales are float32 here: with half-precision scales, MLX would round q * scale to
    # half precision before it adds the bias.
    fields = weight.packed_fields(P, torch.float32) if fields is None else fields
    return apply_factor(P, P.emit(ir.DequantizeNode, **fields), weight.factor, weight.dtype)


def _are_constants(*slots: TensorSlot | None) -> bool:
    return all(s is not None and s.space == Space.CONSTANT for s in slots)


def affine_product_dtype(
    dtype: torch.dtype, scales: Callable[[], torch.Tensor], biases: Callable[[], torch.Tensor], scales_rtol: float = 0.0
) -> torch.dtype:
    """Return the dtype of a product with an affine matrix: `dtype` if it holds the scales and biases, else float32.

    A cast of the scales to `dtype` may have a relative error of at most `scales_rtol`. The biases must be exact: the
    error of a bias would be an error that all values of a group have in common, and products with numbers of one sign
    would add it up. The error of a scale has the same effect if the bias belongs to the exact scale.
    """
    is_held = dtype == torch.float32 or (holds(dtype, scales, scales_rtol) and holds(dtype, biases))
    return dtype if is_held else torch.float32


def holds(dtype: torch.dtype, values: Callable[[], torch.Tensor], rtol: float = 0.0) -> bool:
    """Whether a cast to `dtype` keeps the floats that `values` returns, with a relative error of at most `rtol`.

    `values` is called now. Returns False for fake tensors, which are what a partitioner gets in place of constants.
    """
    with unset_fake_temporarily():
        exact = values()
        if isinstance(exact, FakeTensor):
            return False
        return bool(torch.isclose(exact.to(dtype).to(exact.dtype), exact, rtol=rtol, atol=0).all())


def packed_words(P: Emitter, w: TensorSlot) -> TensorSlot:
    """Return the packed matrix `w`, int32 or uint32, as uint32. Raises `Unsupported` if `w` is not a constant."""
    if w.space != Space.CONSTANT:
        raise Unsupported("packed weights computed at run time are unsupported; make w a parameter or buffer")
    return P.constant(w.name, lambda: w.data().view(torch.uint32), w.shape, torch.uint32)
