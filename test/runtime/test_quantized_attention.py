"""The CPU kernels of quantized KV caches."""

import ctypes
import sys

import numpy as np
import pytest
import torch
from executorch_mlx.custom_ops.quantized_cache import EntryFormat, dequantize, quantize
from test_cpu_kernels import TYPES, Heads, address, heads_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libmlx_cpu_kernels is built on Linux only")

int64 = ctypes.c_int64
FORMATS = [EntryFormat(32, 8, False), EntryFormat(32, 4, True), EntryFormat(64, 8, True), EntryFormat(128, 4, False)]
IDS = ["8", "4, rotated", "8, rotated, 64", "4, 128"]


class Entries(ctypes.Structure):
    _fields_ = [
        ("entries", ctypes.c_void_p),
        ("entry_strides", int64 * 2),
        ("scales", ctypes.c_void_p),
        ("scale_type", ctypes.c_int),
        ("scale_strides", int64 * 2),
        ("groups", int64),
        ("bits", ctypes.c_int),
        ("group_size", ctypes.c_int),
        ("rotate", ctypes.c_bool),
    ]


class Quantize(ctypes.Structure):
    _fields_ = [
        ("x", Heads),
        ("heads", int64),
        ("tokens", int64),
        ("width", int64),
        ("to", Entries),
        ("first_group", int64),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        ("q", Heads),
        ("cache", Entries),
        *((n, int64) for n in ("heads", "kv_heads", "queries", "keys", "width", "value_group", "value_size")),
        ("causal", ctypes.c_bool),
        ("bool_mask", ctypes.c_void_p),
        ("float_mask", ctypes.c_void_p),
        ("mask_strides", int64 * 4),
        ("scale", ctypes.c_float),
        ("y", ctypes.c_void_p),
    ]


def entries_of(entries, scales, format):
    return Entries(
        address(entries),
        (int64 * 2)(*entries.stride()[1:3]),
        address(scales),
        TYPES.index(scales.dtype),
        (int64 * 2)(*scales.stride()[1:3]),
        scales.shape[3] // 2,
        format.bits,
        format.group_size,
        format.rotate,
    )


def attend(library, q, entries, scales, format, value_size, causal=False, mask=None):
    y = torch.full((q.shape[0], q.shape[2], q.shape[1], value_size), torch.nan, dtype=q.dtype)
    mask = None if mask is None else mask.expand(*q.shape[:3], entries.shape[2])
    is_bool = mask is not None and mask.dtype == torch.bool
    masks = (address(mask) if is_bool else None, None if is_bool else address(mask))
    strides = (int64 * 4)(*(mask.stride() if mask is not None else ()))
    width = q.shape[3]
    sizes = q.shape[1], entries.shape[1], q.shape[2], entries.shape[2], width, format.groups(width), value_size
    attention = Attention(
        heads_of(q), entries_of(entries, scales, format), *sizes, causal, *masks, strides, 0.3, address(y)
    )
    library.quantized_attention(ctypes.byref(attention))
    return y.transpose(1, 2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_quantized_entries_equal_torch(library, format, dtype):
    generator = torch.Generator().manual_seed(1)
    # A random number is rarely halfway between two quantized values, where rounding may differ.
    xs = [torch.randn(1, 9, 3, width, generator=generator).to(dtype).transpose(1, 2) for width in (70, 33)]
    expected, expected_scales = quantize(xs, format, dtype)
    entries, scales = torch.full_like(expected, 255), torch.full_like(expected_scales, torch.nan)
    first_group = 0
    for x in xs:
        task = Quantize(heads_of(x), *x.shape[1:], entries_of(entries, scales, format), first_group)
        library.quantize_entries(ctypes.byref(task))
        first_group += format.groups(x.shape[3])
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(scales, expected_scales, rtol=tolerance, atol=tolerance)
    width = sum(format.groups(x.shape[3]) for x in xs) * format.group_size
    restored = dequantize(entries, scales, 0, width, format, torch.float32)
    torch.testing.assert_close(
        restored,
        dequantize(expected, expected_scales, 0, width, format, torch.float32),
        rtol=0,
        atol=1.01 * float(expected_scales.float().amax()),
    )
    if dtype == torch.float32:
        assert (entries != expected).float().mean() < 1e-3


def cache_of(generator, format, keys, dtype=torch.float32, width=72, value_size=48):
    """Return the entries and scales of random keys and values, and the dequantized keys and values in float64."""
    k, v = (torch.randn(1, 2, keys, size, generator=generator) for size in (width, value_size))
    entries, scales = quantize([k, v], format, dtype)
    k = dequantize(entries, scales, 0, width, format, torch.float64)
    return entries, scales, k, dequantize(entries, scales, format.groups(width), value_size, format, torch.float64)


MASKS = {
    "none": lambda generator, queries, keys: {},
    "causal": lambda generator, queries, keys: {"causal": True},
    # Only the last quarter of the keys is visible. The kernel takes the keys in parts, and some parts are all masked.
    "bool": lambda generator, queries, keys: {
        "mask": torch.arange(keys).expand(queries, keys) >= keys - max(1, keys // 4)
    },
    "float": lambda generator, queries, keys: {"mask": torch.randn(6, queries, keys, generator=generator)},
}


@pytest.mark.parametrize("make_mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 700), (3, 17), (70, 300), (2, 2000)])
def test_attention(library, queries, keys, make_mask):
    format = FORMATS[queries % len(FORMATS)]
    generator = torch.Generator().manual_seed(queries)
    q = torch.randn(1, queries, 6, 72, generator=generator).transpose(1, 2)
    entries, scales, k, v = cache_of(generator, format, keys)
    arguments = make_mask(generator, queries, keys)
    y = attend(library, q, entries, scales, format, 48, **arguments)
    scores = q.double() @ k.repeat_interleave(3, 1).mT * 0.3
    mask = arguments.get("mask")
    if arguments.get("causal"):
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    torch.testing.assert_close(y.double(), scores.softmax(-1) @ v.repeat_interleave(3, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keys", [256, 257])  # the last key is in a part with others, or in one of its own
def test_a_score_that_is_nan_makes_the_result_nan(library, keys):
    format, generator = FORMATS[0], torch.Generator().manual_seed(4)
    entries, scales, *_ = cache_of(generator, format, keys)
    scales[:, :, -1] = torch.nan
    y = attend(library, torch.randn(1, 4, 1, 72, generator=generator), entries, scales, format, 48)
    assert y.isnan().all()


@pytest.mark.parametrize("dtype, format", zip([*TYPES, torch.float32], FORMATS), ids=IDS)
def test_a_query_has_the_same_bits_in_every_call(library, dtype, format):
    """One call with all queries agrees with calls of fewer queries, which get the keys up to their last query."""
    total, generator = 300, torch.Generator().manual_seed(2)
    entries, scales, *_ = cache_of(generator, format, total, dtype)
    q = torch.randn(1, 4, total, 72, generator=generator).to(dtype)
    whole = attend(library, q, entries, scales, format, 48, causal=True)
    assert len(np.unique(whole.float())) > total
    for lengths in ([1, 9], [7, 1, 64], [200]):
        at, i = 0, 0
        while at < total:
            last = min(total, at + lengths[i % len(lengths)])
            part = attend(library, q[:, :, at:last], entries[:, :, :last], scales[:, :, :last], format, 48, causal=True)
            assert part.equal(whole[:, :, at:last]), (lengths, at)
            at, i = last, i + 1


@pytest.mark.parametrize("queries", [1, 4, 40])
def test_unseen_infinite_and_nan_values_have_no_effect(library, queries):
    """The result has the bits that it has with any finite values."""
    format, generator = FORMATS[0], torch.Generator().manual_seed(queries)
    q = torch.randn(1, 4, queries, 72, generator=generator)
    entries, scales, *_ = cache_of(generator, format, 300)
    damaged = scales.clone()
    damaged[:, :, 7], damaged[:, :, 299] = torch.inf, torch.nan
    seen = torch.arange(300).expand(queries, 300) % 150 < 149
    seen = seen & (torch.arange(300) != 7)
    y, expected = (attend(library, q, entries, x, format, 48, mask=seen) for x in (damaged, scales))
    assert y.equal(expected)
    y, expected = (
        attend(library, q[:, :, -4:], entries[:, :, -4:], x[:, :, -4:], format, 48, causal=True)
        for x in (damaged, scales)
    )
    assert y[:, :, :-1].equal(expected[:, :, :-1]) and y[:, :, -1].isnan().all()
