"""The CPU kernels, for every instruction set that this processor supports.

The ctypes structures here and in product_arguments.py are the arguments of the kernels, as runtime/kernels/cpu declares
them in C++.
"""

import ctypes
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from product_arguments import BFLOAT16, FLOAT16, FLOAT32, SILU, HalfMatmul, QuantizedMatmul

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libmlx_cpu_kernels is built on Linux only")


# -- matrix products --------------------------------------------------------------------------------

TYPES = [torch.float32, torch.float16, torch.bfloat16]
HALF_TYPES = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])


def encode(x: np.ndarray, dtype: int) -> np.ndarray:
    """Return float32 values converted to `dtype`: float16 and bfloat16 as uint16. bfloat16 is truncated."""
    if dtype == FLOAT32:
        return x
    return x.astype(np.float16).view(np.uint16) if dtype == FLOAT16 else (x.view(np.uint32) >> 16).astype(np.uint16)


def decode(x: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == FLOAT32:
        return x
    return x.view(np.float16).astype(np.float32) if dtype == FLOAT16 else (x.astype(np.uint32) << 16).view(np.float32)


def assert_product(y: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    assert np.abs(y - x @ w.T.astype(float)).max() < 3e-6 * (np.abs(x) @ np.abs(w).T).max()


@HALF_TYPES
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("m, n, k", [(1, 203, 1024), (3, 17, 5), (70, 600, 100)])
def test_half_matmul(library, dtype, column_major, m, n, k):
    rng = np.random.default_rng(2)
    w = encode(rng.standard_normal((k, n) if column_major else (n, k), np.float32), dtype)
    dense = decode(w, dtype).T if column_major else decode(w, dtype)
    x, y = rng.standard_normal((m, k), np.float32), np.full((m, n), np.nan, np.float32)
    strides = (1, n) if column_major else (k, 1)
    matmul = HalfMatmul(x.ctypes.data, w.ctypes.data, dtype, *strides, m, n, k, y.ctypes.data, FLOAT32, FLOAT32)
    library.half_matmul(ctypes.byref(matmul), 1)
    assert_product(y, x, dense)


@HALF_TYPES
@pytest.mark.parametrize("m, n, k", [(1, 203, 1024), (3, 17, 5), (4, 31, 66), (70, 60, 1026)])
def test_half_matmul_of_half_operands(library, dtype, m, n, k):
    """If k is even, bfloat16 elements are multiplied in pairs on processors that have an instruction for it."""
    rng = np.random.default_rng(3)
    x, w = (encode(rng.standard_normal(shape, np.float32), dtype) for shape in ((m, k), (n, k)))
    results = []
    for y_type in (FLOAT32, dtype):
        y = np.full((m, n), 7, np.float32 if y_type == FLOAT32 else np.uint16)
        matmul = HalfMatmul(x.ctypes.data, w.ctypes.data, dtype, k, 1, m, n, k, y.ctypes.data, dtype, y_type)
        library.half_matmul(ctypes.byref(matmul), 1)
        results.append(y)
    assert_product(results[0], decode(x, dtype), decode(w, dtype))
    expected = torch.from_numpy(results[0]).to(TYPES[dtype])
    assert torch.equal(torch.from_numpy(results[1].view(np.int16)), expected.view(torch.int16))


@HALF_TYPES
def test_half_results_are_rounded_to_nearest_even(library, dtype):
    """The RMS norm of a row of ones is the weight itself, so the kernel only rounds the weight."""
    exact = decode(np.arange(1 << 16, dtype=np.uint16), dtype)
    bits = exact[np.isfinite(exact)].view(np.uint32)
    # Every value of the dtype, and float32 values at and beside the middle between it and the next value. The middle is
    # 0x8000 away for bfloat16, and 0x1000 for float16.
    offsets = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001], np.uint32)
    x = torch.from_numpy((bits[:, None] + offsets).ravel().view(np.float32))
    ones, y = (torch.ones(len(x), dtype=TYPES[dtype]) for _ in range(2))
    sizes = (ctypes.c_int64(1), ctypes.c_int64(len(x)))
    library.norm(address(ones), dtype, False, address(x), None, FLOAT32, address(y), *sizes, ctypes.c_float(0))
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y[~x.isnan()], x[~x.isnan()].to(TYPES[dtype]))


@HALF_TYPES
def test_half_matmul_converts_every_bit_pattern(library, dtype):
    w = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
    x, y = np.ones((1, 1), np.float32), np.empty((1, 1 << 16), np.float32)
    matmul = HalfMatmul(x.ctypes.data, w.ctypes.data, dtype, 1, 1, 1, 1 << 16, 1, y.ctypes.data, FLOAT32, FLOAT32)
    library.half_matmul(ctypes.byref(matmul), 1)
    np.testing.assert_array_equal(y, decode(w, dtype).T)


@pytest.mark.parametrize("scale_type", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("m", [1, 2, 7, 40])
@pytest.mark.parametrize(
    "bits, group_size, k",
    [(4, 32, 96), (4, 64, 1024), (4, 128, 384), (8, 32, 160), (8, 64, 64), (8, 128, 256), (2, 64, 192)],
)
def test_quantized_matmul(library, bits, group_size, k, m, scale_type):
    rng = np.random.default_rng(1)
    n = 203
    q = rng.integers(0, 2**bits, (n, k))
    per_word = 32 // bits
    shifted = q.reshape(n, -1, per_word).astype(np.uint64) << (np.arange(per_word, dtype=np.uint64) * bits)
    w = shifted.sum(-1).astype(np.uint32)
    x = rng.standard_normal((m, k), np.float32)
    scales, biases = (encode(rng.standard_normal((n, k // group_size), np.float32), scale_type) for _ in range(2))
    scale, bias = (decode(values, scale_type).repeat(group_size, 1) for values in (scales, biases))
    y = np.full((m, n), np.nan, np.float32)
    arrays = (a.ctypes.data for a in (x, w, scales, biases))
    matmul = QuantizedMatmul(*arrays, scale_type, bits, group_size, m, n, k, y.ctypes.data, FLOAT32)
    assert library.supports_quantized(bits, group_size, k)
    library.quantized_matmul(ctypes.byref(matmul), 1)
    assert_product(y, x, q * scale.astype(float) + bias)


# -- SiLU and RMSNorm -------------------------------------------------------------------------------


def address(tensor):
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("count", [1, 5, 16, 33, 1000, 100_003])
def test_silu(library, count):
    x = torch.linspace(-95, 95, count)
    y = torch.full((count,), torch.nan)
    library.unary(SILU, address(x), FLOAT32, address(y), ctypes.c_int64(count))
    torch.testing.assert_close(y, torch.nn.functional.silu(x.double()).float(), rtol=1e-6, atol=1e-36)


def test_silu_of_special_values(library):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38, -3e38, 1e-40])
    y = torch.empty_like(x)
    library.unary(SILU, address(x), FLOAT32, address(y), ctypes.c_int64(len(x)))
    torch.testing.assert_close(y, torch.nn.functional.silu(x), equal_nan=True)
    assert y[4].signbit()


class ElementwiseStep(ctypes.Structure):
    _fields_ = [
        ("operation", ctypes.c_uint8),
        ("a", ctypes.c_void_p),
        ("a_stride", ctypes.c_int64),
        ("b", ctypes.c_void_p),
        ("b_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("width", ctypes.c_int64),
    ]


# In the order of the C++ enum `Elementwise`.
BINARY_OPERATIONS = [torch.add, torch.sub, torch.mul, torch.maximum]
gelu = torch.nn.functional.gelu
UNARY_OPERATIONS = [
    torch.sigmoid,
    torch.nn.functional.silu,
    torch.tanh,
    gelu,
    partial(gelu, approximate="tanh"),
    torch.erf,
]
OPERATIONS = [*BINARY_OPERATIONS, *UNARY_OPERATIONS, torch.clone]


@pytest.mark.parametrize("operation", range(len(OPERATIONS)))
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 17), (2, 128), (1, 40)])
def test_elementwise_step(library, rows, width, operation):
    """The operands are rows with gaps between them, rows without gaps, and one row that serves all rows."""
    generator = torch.Generator().manual_seed(rows * width)
    a, b = (torch.randn(rows, width + 3, generator=generator) * 2 for _ in range(2))
    a[0, 0], b[-1, 0] = torch.nan, torch.nan
    for x, z in ((a, b), (a[:, :width].clone(), b[:, :width].clone()), (a, b[:1].expand(rows, -1))):
        y = torch.empty(rows, width)
        step = ElementwiseStep(operation, x.data_ptr(), x.stride(0), z.data_ptr(), z.stride(0), y.data_ptr(), width)
        library.elementwise_steps(ctypes.byref(step), 1, ctypes.c_int64(rows), FLOAT32)
        operands = [x[:, :width], z[:, :width]] if operation < len(BINARY_OPERATIONS) else [x[:, :width]]
        expected = OPERATIONS[operation](*(operand.double() for operand in operands)).float()
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("operation", range(len(BINARY_OPERATIONS), len(OPERATIONS) - 1))
def test_unary_operations_of_all_magnitudes(library, operation):
    magnitudes = torch.cat([torch.logspace(-38, 38, 2000), torch.linspace(0, 30, 3001), torch.tensor([torch.inf])])
    x = torch.cat([magnitudes, -magnitudes])
    y = torch.empty_like(x)
    library.unary(operation, address(x), FLOAT32, address(y), ctypes.c_int64(x.numel()))
    expected = OPERATIONS[operation](x.double()).float()
    torch.testing.assert_close(y, expected, rtol=4e-6, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 17), (2, 128), (300, 1024), (5, 1030)])
def test_rms_norm(library, rows, width, has_weight):
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randn(rows, width, generator=generator) * 3
    weight = torch.randn(width, generator=generator) if has_weight else None
    y = torch.empty_like(x)
    sizes = (ctypes.c_int64(rows), ctypes.c_int64(width))
    library.norm(address(x), FLOAT32, False, address(weight), None, FLOAT32, address(y), *sizes, ctypes.c_float(1e-5))
    expected = torch.nn.functional.rms_norm(x, [width], weight, 1e-5)
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("parameters", [(), ("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 17), (2, 128), (300, 384), (5, 1030)])
def test_layer_norm(library, rows, width, parameters):
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randn(rows, width, generator=generator) * 3 + 100  # a mean far from 0 must not cost digits
    tensors = {name: torch.randn(width, generator=generator) for name in parameters}
    y, pointers = torch.empty_like(x), [address(tensors.get(name)) for name in ("weight", "bias")]
    sizes = (ctypes.c_int64(rows), ctypes.c_int64(width))
    library.norm(address(x), FLOAT32, True, *pointers, FLOAT32, address(y), *sizes, ctypes.c_float(1e-5))
    expected = torch.nn.functional.layer_norm(x.double(), [width], **{k: t.double() for k, t in tensors.items()})
    torch.testing.assert_close(y, expected.float(), rtol=2e-5, atol=2e-5)


# -- convolution ------------------------------------------------------------------------------------


class WindowAxis(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("size", "result", "window", "stride", "padding", "dilation")]


class Convolution(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("groups", "inputs", "outputs")),
        ("axes", WindowAxis * 3),
    ]


@pytest.mark.parametrize(
    "groups, inputs, outputs",
    [
        (1, 1, 1),
        (16, 1, 1),
        (37, 1, 1),
        (5, 4, 4),
        (3, 3, 8),
        (6, 1, 2),
        (1, 3, 70),
        (3, 5, 17),
        (2, 9, 4),
        (2, 130, 64),
    ],
)
@pytest.mark.parametrize(
    "size, window, stride, padding, dilation",
    [
        ((1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
        ((1, 10, 11), (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1)),  # the windows are rows of x
        ((1, 1, 40), (1, 1, 4), (1, 1, 1), (0, 0, 3), (1, 1, 1)),
        ((1, 9, 30), (1, 3, 5), (1, 2, 1), (0, 1, 4), (1, 1, 2)),
        ((4, 5, 6), (2, 3, 2), (2, 1, 3), (1, 0, 5), (2, 1, 3)),
        ((1, 1, 2), (1, 1, 3), (1, 1, 4), (0, 0, 9), (1, 1, 7)),  # each position has at most one element inside of x
    ],
)
def test_convolution(library, groups, inputs, outputs, size, window, stride, padding, dilation):
    generator = torch.Generator().manual_seed(groups)
    x = torch.randn(2, *size, groups * inputs, generator=generator)
    w = torch.randn(groups * outputs, *window, inputs, generator=generator)
    w /= w[0].numel() ** 0.5
    expected = torch.nn.functional.conv3d(x.movedim(-1, 1), w.movedim(-1, 1), None, stride, padding, dilation, groups)
    expected = expected.movedim(1, -1).contiguous()
    axes = (WindowAxis * 3)(*zip(size, expected.shape[1:4], window, stride, padding, dilation, strict=True))
    arguments = ctypes.byref(Convolution(len(x), groups, inputs, outputs, axes))
    library.convolution_weights.restype = ctypes.c_int64
    packed = torch.full([library.convolution_weights(arguments)], torch.nan)
    y = torch.full_like(expected, torch.nan)
    library.pack_convolution(arguments, address(w), address(packed))
    library.convolution(arguments, address(x), address(packed), address(y))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


# -- rotary embedding -------------------------------------------------------------------------------


class Heads(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("type", ctypes.c_int), ("strides", ctypes.c_int64 * 4)]


def heads_of(x: torch.Tensor) -> Heads:
    return Heads(address(x), TYPES.index(x.dtype), (ctypes.c_int64 * 4)(*x.stride()))


class Rope(ctypes.Structure):
    _fields_ = [
        ("x", Heads),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "width", "half")),
        ("offsets", ctypes.c_void_p),
        ("offset_per_sequence", ctypes.c_bool),
        ("periods", ctypes.c_void_p),
        ("base", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("y", ctypes.c_void_p),
    ]


def random_tensor(generator, shape, memory_order):
    """A random tensor whose axes lie in memory in the order `memory_order`, outermost first."""
    x = torch.randn([shape[axis] for axis in memory_order], generator=generator)
    return x.permute([memory_order.index(axis) for axis in range(len(shape))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_operands_of_silu_rms_norm_and_rope(library, dtype):
    """The kernels compute in float32 and round the result."""
    x = torch.randn(3, 1030, generator=torch.Generator().manual_seed(0)).to(dtype)
    y, z, kind, floats = torch.empty_like(x), torch.empty(x.shape), TYPES.index(dtype), x.float()
    library.unary(SILU, address(x), kind, address(y), ctypes.c_int64(x.numel()))
    library.unary(SILU, address(floats), FLOAT32, address(z), ctypes.c_int64(x.numel()))
    assert torch.equal(y, z.to(dtype))

    sizes, weight = (ctypes.c_int64(3), ctypes.c_int64(1030), ctypes.c_float(1e-6)), floats[0].to(dtype)
    library.norm(address(x), kind, False, address(weight), None, kind, address(y), *sizes)
    library.norm(address(floats), FLOAT32, False, address(floats), None, FLOAT32, address(z), *sizes)
    assert torch.equal(y, z.to(dtype))

    offset, results = torch.tensor([5], dtype=torch.int32), []
    for heads in (x.reshape(1, 3, 10, 103), floats.reshape(1, 3, 10, 103)):
        result = torch.empty(1, 3, 10, 103, dtype=heads.dtype)
        rope = Rope(heads_of(heads), *heads.shape, 50, address(offset), False, None, 100.0, 1.0, address(result))
        library.rope(ctypes.byref(rope))
        results.append(result)
    assert torch.equal(results[0], results[1].to(dtype))


@pytest.mark.parametrize("has_periods", [True, False])
@pytest.mark.parametrize("memory_order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 2, 1)])
@pytest.mark.parametrize("offsets", [[7], [0, 30, 2000]])
def test_rope(library, memory_order, offsets, has_periods):
    batch, heads, tokens, width, half = 3, 2, 9, 24, 8
    generator = torch.Generator().manual_seed(0)
    x = random_tensor(generator, (batch, heads, tokens, width), memory_order)
    periods = torch.rand(half, generator=generator) * 50 + 1 if has_periods else None
    offset, y = torch.tensor(offsets, dtype=torch.int32), torch.empty(batch, heads, tokens, width)
    rope = Rope(
        heads_of(x),
        batch,
        heads,
        tokens,
        width,
        half,
        address(offset),
        len(offsets) > 1,
        address(periods),
        100.0,
        0.5,
        address(y),
    )
    library.rope(ctypes.byref(rope))

    periods = 100.0 ** (torch.arange(half) / half) if periods is None else periods
    position = (offset.expand(batch)[:, None] + torch.arange(tokens)) * 0.5
    angle = position[:, None, :, None].double() / periods.double()
    left, right, rest = x.double().split([half, half, width - 2 * half], -1)
    rotated = (left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos(), rest)
    torch.testing.assert_close(y.double(), torch.cat(rotated, -1), rtol=1e-4, atol=3e-4)


def test_angles_of_earlier_calls_of_rope(library):
    """The kernel keeps the angles of its last calls. A call that differs in one argument computes its own."""
    x = torch.randn(2, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    slow, fast = torch.full([4], 50.0), torch.full([4], 5.0)

    def rotate(offsets=(3,), periods=None, base=100.0, scale=1.0, half=4, tokens=4):
        part, offset = x[:, :, :tokens].contiguous(), torch.tensor(offsets, dtype=torch.int32)
        y = torch.empty_like(part)
        rope = Rope(
            heads_of(part),
            *part.shape,
            half,
            address(offset),
            len(offsets) > 1,
            address(periods),
            base,
            scale,
            address(y),
        )
        library.rope(ctypes.byref(rope))
        return y

    calls = [
        {},
        {"offsets": (4,)},
        {"offsets": (3, 4)},
        {"offsets": (3, 5)},
        {"base": 90.0},
        {"scale": 0.5},
        {"half": 3},
        {"periods": slow},
        {"periods": fast},
        {"tokens": 3},
    ]
    first = [rotate(**call) for call in calls]
    for i, call in enumerate(calls):
        rotate(**calls[i - 1])
        assert torch.equal(rotate(**call), first[i])
        assert torch.equal(rotate(**call), first[i])
        assert all(not torch.equal(first[i], y) for y in first[:i])


# -- attention --------------------------------------------------------------------------------------


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, Heads) for name in "qkv"),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "width", "v_width")),
        ("causal", ctypes.c_bool),
        ("zero_if_unseen", ctypes.c_bool),
        ("bool_mask", ctypes.c_void_p),
        ("float_mask", ctypes.c_void_p),
        ("mask_strides", ctypes.c_int64 * 4),
        ("scale", ctypes.c_float),
        ("y", ctypes.c_void_p),
    ]


def attend(library, q, k, v, causal=False, mask=None, scale=0.5, zero_if_unseen=False):
    scores = (*q.shape[:3], k.shape[2])
    y = torch.full((q.shape[0], q.shape[2], q.shape[1], v.shape[3]), torch.nan, dtype=q.dtype)
    mask = None if mask is None else mask.expand(scores)
    is_bool = mask is not None and mask.dtype == torch.bool
    operands = (heads_of(x) for x in (q, k, v))
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    masks = (address(mask) if is_bool else None, None if is_bool else address(mask))
    mask_strides = (ctypes.c_int64 * 4)(*(mask.stride() if mask is not None else ()))
    attention = Attention(*operands, *sizes, causal, zero_if_unseen, *masks, mask_strides, scale, address(y))
    library.attention(ctypes.byref(attention), 1)
    return y.transpose(1, 2)


MASKS = {
    "none": lambda generator, queries, keys: {},
    "causal": lambda generator, queries, keys: {"causal": True},
    "bool": lambda generator, queries, keys: {"mask": torch.rand(2, 1, queries, keys, generator=generator) > 0.5},
    "float": lambda generator, queries, keys: {"mask": torch.randn(6, queries, keys, generator=generator)},
    "float, broadcast": lambda generator, queries, keys: {"mask": torch.randn(queries, 1, generator=generator)},
}


@pytest.mark.parametrize("make_mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("memory_order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 300), (3, 17), (150, 150), (5, 2000)])
def test_attention(library, queries, keys, memory_order, make_mask):
    generator = torch.Generator().manual_seed(queries)
    q = random_tensor(generator, (2, 6, queries, 24), memory_order)
    k, v = (random_tensor(generator, (2, 3, keys, width), memory_order) for width in (24, 10))
    arguments = make_mask(generator, queries, keys)
    y = attend(library, q, k, v, **arguments)
    torch.testing.assert_close(y.double(), reference_attention(q, k, v, arguments), rtol=1e-4, atol=5e-6)


def reference_attention(q, k, v, arguments):
    """Return attention in float64 with the scale 0.5. Two heads of q share each head of k and v."""
    queries, keys = q.shape[2], k.shape[2]
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.5
    mask = arguments.get("mask")
    if arguments.get("causal"):
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if mask is not None and mask.dtype == torch.bool:
        # As in MLX, a query that sees no key weighs all keys equally.
        scores = torch.where(mask, scores, torch.finfo(torch.float32).min)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v.double().repeat_interleave(2, 1)


@pytest.mark.parametrize("mask", ["causal", "float"])
@pytest.mark.parametrize("memory_order", [(0, 2, 1, 3), (0, 1, 3, 2)])
@pytest.mark.parametrize("queries, keys, width, v_width", [(1, 300, 24, 10), (5, 77, 7, 128), (150, 150, 24, 48)])
@pytest.mark.parametrize(
    "dtype, cache_dtype",
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.bfloat16)],
    ids=["bfloat16", "float16", "float32 over bfloat16"],
)
def test_attention_of_half_operands(library, dtype, cache_dtype, queries, keys, width, v_width, memory_order, mask):
    generator = torch.Generator().manual_seed(queries)
    q = random_tensor(generator, (2, 6, queries, width), memory_order).to(dtype)
    k, v = (random_tensor(generator, (2, 3, keys, w), memory_order).to(cache_dtype) for w in (width, v_width))
    arguments = MASKS[mask](generator, queries, keys)
    y = attend(library, q, k, v, **arguments)
    expected = reference_attention(q, k, v, arguments)
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-4
    torch.testing.assert_close(y.double(), expected, rtol=rounding, atol=5e-6)


def test_causal_attention_with_more_queries_than_keys(library):
    """The last query sees all 30 keys, query 10 sees only key 0. Queries 0 to 9 see no key, and average all values."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, tokens, 8, generator=generator) for tokens in (40, 30))
    y = attend(library, q, k, k, causal=True)
    torch.testing.assert_close(y[0, 0, :10], k[0, 0].mean(0).expand(10, 8), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[0, 0, 10], k[0, 0, 0])


def test_attention_with_infinity_and_nan_in_the_mask(library):
    q, k = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 20, 8)
    mask = torch.zeros(4, 20)
    mask[0], mask[1, 3], mask[2, :19] = -torch.inf, torch.nan, -torch.inf
    y = attend(library, q, k, torch.arange(20.0).reshape(1, 1, 20, 1), mask=mask)[0, 0, :, 0]
    assert y[:2].isnan().all() and y[2:].tolist() == [19, 9.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries, width", [(1, 24), (1, 32), (4, 24), (40, 24), (40, 32)])
def test_unseen_infinite_and_nan_values_have_no_effect(library, dtype, queries, width):
    """The result has the bits that it has with any finite values."""
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (torch.randn(1, 2, n, width, generator=generator).to(dtype) for n in (queries, 300, 300))
    seen = torch.rand(queries, 300, generator=generator) > 0.5
    seen[:, 7] = seen[:, 8] = False
    damaged = v.clone()
    damaged[:, :, 7, 3], damaged[:, :, 8] = torch.inf, torch.nan
    assert attend(library, q, k, damaged, mask=seen).equal(attend(library, q, k, v, mask=seen))
    damaged[:, :, 299] = -torch.inf
    y, expected = (attend(library, q[:, :, -4:], k[:, :, -4:], x[:, :, -4:], causal=True) for x in (damaged, v))
    assert y[:, :, :-1].equal(expected[:, :, :-1]) and y[:, :, -1].isinf().all()


def test_the_kernels_run_with_as_many_threads_as_the_system_permits(delegate):
    program = """if True:
        import ctypes, resource, sys

        sys.path.insert(0, sys.argv[2])
        from kernel_library import kernel_library

        run_items = kernel_library(sys.argv[1]).run_items
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + (200 << 20)  # room for the stacks of some threads
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        done = []
        item = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(lambda _, i: done.append(i))
        for _ in range(2):
            run_items(1000, item, None)
        assert sorted(done) == sorted(2 * list(range(1000)))
    """
    command = [sys.executable, "-c", program, delegate, Path(__file__).parents[1]]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "3000", "OPENBLAS_NUM_THREADS": ""})
