"""GGUF's block formats in MLX's packed format.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 store 32 integers with a scale, and a minimum or none. MLX's affine format with groups
of 32 can express them exactly. Q4_K and Q5_K also have groups of 32, but their scales are products, which are rounded
to float16. TQ1_0 and TQ2_0 have the values -d, 0 and d, which MLX's affine format can express too. MXFP4 and NVFP4 are
formats of MLX, with another order of the elements. Other formats are dequantized and quantized again.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from ....custom_ops.packing import FLOAT_MODES, dequantize, pack
from ..quantization.scale_search import fit

GROUP_SIZE = 32
# Formats whose values are read without a conversion → their dtype.
FLOATS = {Type.F64: torch.float64, Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_TERNARY = (Type.TQ1_0, Type.TQ2_0)  # formats with the values -d, 0 and d
# Formats whose values are the same after the conversion.
EXACT = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4, Type.NVFP4, *_TERNARY)
_STEP_ELEMENTS = 1 << 22  # the number of weights that are converted at a time, to bound the peak memory


@dataclass
class Packing:
    """A packed weight, and the error of its conversion.

    `operands` are the packed weight, the scales and the biases, which MXFP4 and NVFP4 lack. `custom_ops.packing`
    explains them and `mode`. `squared_error` is the sum of the squared errors of the values, `squared_norm` that of
    their squares. Both are 0 for the formats in `EXACT`.
    """

    operands: tuple[torch.Tensor, ...]
    bits: int
    group_size: int = GROUP_SIZE
    mode: str = "affine"
    squared_error: float = 0.0
    squared_norm: float = 0.0


def float_tensor(tensor: gguf.ReaderTensor) -> torch.Tensor:
    """Return the values of a tensor of any type. Floats stay memory-mapped; other types become float32."""
    shape = _shape(tensor)
    if (dtype := FLOATS.get(tensor.tensor_type)) is not None:
        return torch.from_numpy(tensor.data).view(dtype).reshape(shape)
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).reshape(shape)


def packed_tensor(tensor: gguf.ReaderTensor) -> Packing:
    """Convert a quantized tensor [..., K], a few rows at a time.

    The scales and biases are float16. The scales of MXFP4 and NVFP4 are uint8.
    """
    shape, type_ = _shape(tensor), tensor.tensor_type
    rows = np.asarray(tensor.data).reshape(-1, tensor.data.shape[-1])
    count, columns = len(rows), shape[-1]
    is_float = type_ in _FLOAT_READERS
    mode, read = _FLOAT_READERS.get(type_, ("affine", None))
    bits, group_size = FLOAT_MODES[mode] if is_float else (_bits(type_), GROUP_SIZE)
    operands = (
        torch.empty(count, columns * bits // 32, dtype=torch.uint32),
        *(
            torch.empty(count, columns // group_size, dtype=dtype)
            for dtype in ([torch.uint8] if is_float else [torch.float16] * 2)
        ),
    )
    packing = Packing(tuple(t.unflatten(0, shape[:-1]) for t in operands), bits, group_size, mode)
    step = max(1, _STEP_ELEMENTS // columns)
    for first in range(0, count, step):
        blocks = rows[first : first + step]
        part = read(blocks) if is_float else _affine(blocks, type_, bits)
        for whole, converted in zip(operands, part):
            whole[first : first + step] = converted
        if type_ not in EXACT:
            expected = torch.from_numpy(gguf.dequantize(blocks, type_))
            packing.squared_error += float((dequantize(*part, GROUP_SIZE, bits) - expected).square().sum())  # type: ignore[call-arg]
            packing.squared_norm += float(expected.square().sum())
    return packing


def _shape(tensor: gguf.ReaderTensor) -> list[int]:
    return [int(n) for n in reversed(tensor.shape)]


def _bits(type_: Type) -> int:
    """Return the number of bits to which a GGUF format is converted.

    It is 4 for formats with at most 5 bits per weight, scales included, and 8 for the others. MLX also has formats of 5
    and 6 bits, but no fast kernels for them on a CPU.
    """
    values, size = gguf.GGML_QUANT_SIZES[type_]
    return 4 if size * 8 / values <= 5 else 8


def _affine(blocks: np.ndarray, type_: Type, bits: int):
    """Return the packed rows, scales and biases of `blocks`, rows of bytes of any format but MXFP4 and NVFP4."""
    if type_ in _GROUP_READERS:
        return _packed_groups(blocks, type_)
    values = torch.from_numpy(gguf.dequantize(blocks, type_))
    return _ternary(values, bits) if type_ in _TERNARY else fit(values, bits, GROUP_SIZE, torch.float16)


def _ternary(values: torch.Tensor, bits: int):
    largest = values.unflatten(-1, (-1, GROUP_SIZE)).abs().amax(-1).half()
    return pack((values.sign() + 1).to(torch.uint8), bits), largest, -largest


def _mxfp4(blocks: np.ndarray):
    """Return the packed rows and scales of `blocks`, rows of bytes: an exponent, then 32 elements."""
    data = torch.from_numpy(np.array(blocks)).unflatten(-1, (-1, 17))
    return pack(_nibbles(data[..., 1:]).flatten(-2), 4), data[..., 0]


def _nvfp4(blocks: np.ndarray):
    """Return the packed rows and scales of `blocks`, rows of bytes: four scales, then 16 elements for each of them."""
    data = torch.from_numpy(np.array(blocks)).unflatten(-1, (-1, 36))
    scales = data[..., :4].flatten(-2)
    return pack(_nibbles(data[..., 4:].unflatten(-1, (4, 8))).flatten(-3), 4), scales.where(scales != 127, 0)


# A format of MLX whose scales are 8-bit floats → its mode, and the function that reads rows of its blocks.
_FLOAT_READERS = {Type.MXFP4: ("mxfp4", _mxfp4), Type.NVFP4: ("nvfp4", _nvfp4)}


def _packed_groups(blocks: np.ndarray, type_: Type):
    """Return the packed rows, scales and biases of `blocks`, rows of bytes in a format with groups of 32."""
    _, size = gguf.GGML_QUANT_SIZES[type_]
    data = torch.from_numpy(np.array(blocks)).unflatten(-1, (-1, size))  # [rows, blocks, bytes of a block]
    q, scales, biases = _GROUP_READERS[type_](data)
    q, scales, biases = (t.reshape(len(blocks), -1) for t in (q, scales, biases))
    return pack(q, _bits(type_)), scales.half(), biases.half()


# Each function below that is named after a format takes blocks [..., bytes] of this format, and returns integers
# [..., 32 or 256], scales and biases. The functions between them are helpers.


def _read_float16(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low halves of the bytes [..., n], then the high halves: [..., 2 n]."""
    return torch.cat((data & 15, data >> 4), -1)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return the bits of the bytes [..., 4], least significant first, times 16: [..., 32]."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((data.unsqueeze(-1) >> bits & 1) << 4).flatten(-2)


def _q4_0(data):
    d = _read_float16(data[..., :2])
    return _nibbles(data[..., 2:]), d, -8 * d


def _q4_1(data):
    return _nibbles(data[..., 4:]), _read_float16(data[..., :2]), _read_float16(data[..., 2:4])


def _q5_0(data):
    d = _read_float16(data[..., :2])
    return _nibbles(data[..., 6:]) | _fifth_bits(data[..., 2:6]), d, -16 * d


def _q5_1(data):
    q = _nibbles(data[..., 8:]) | _fifth_bits(data[..., 4:8])
    return q, _read_float16(data[..., :2]), _read_float16(data[..., 2:4])


def _q8_0(data):
    d = _read_float16(data[..., :2])
    return data[..., 2:] ^ 128, d, -128 * d  # int8 + 128 as uint8


def _k_scales(data):
    """Return the scales and biases of the 8 groups of each Q4_K or Q5_K block.

    The first 16 bytes of a block hold two factors in float16, 8 scales of 6 bits and 8 minimums of 6 bits.
    """
    d, d_min = _read_float16(data[..., :2]), _read_float16(data[..., 2:4])
    low, middle, high = data[..., 4:8], data[..., 8:12], data[..., 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return d * scales, -d_min * minimums


def _k_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the integers of 8 groups from the bytes [..., 128]. 32 bytes hold two groups."""
    return _nibbles(data.unflatten(-1, (4, 32))).flatten(-2)


def _q4_k(data):
    return _k_nibbles(data[..., 16:]), *_k_scales(data)


def _q5_k(data):
    groups = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    fifth = (data[..., 16:48].unsqueeze(-2) >> groups & 1) << 4  # bit g of byte i belongs to value i of group g
    return _k_nibbles(data[..., 48:]) | fifth.flatten(-2), *_k_scales(data)


# A format with groups of 32 → the function that reads its blocks.
_GROUP_READERS = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
}
