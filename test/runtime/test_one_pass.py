"""RMSNorm, SiLU, rotary embedding and attention in one pass, by the kernels of every instruction set."""

import ctypes
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MLX has Accelerate elsewhere")

SIZES = (1, 5, 16, 33, 1000, 100_003)
FEW_ULPS = dict(rtol=1e-6, atol=1e-36)


class Rope(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p), ("strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "width", "half")),
        ("offsets", ctypes.c_void_p), ("offset_for_each", ctypes.c_bool), ("periods", ctypes.c_void_p),
        ("base", ctypes.c_float), ("scale", ctypes.c_float), ("y", ctypes.c_void_p),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name + of, kind) for name in "qkv" for of, kind in (("", ctypes.c_void_p), ("_strides", ctypes.c_int64 * 4))),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "width", "values")),
        ("causal", ctypes.c_bool), ("seen", ctypes.c_void_p), ("added", ctypes.c_void_p),
        ("mask_strides", ctypes.c_int64 * 4), ("scale", ctypes.c_float), ("y", ctypes.c_void_p),
    ]


def at(tensor):
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("count", SIZES)
def test_silu(library, count):
    x = torch.linspace(-95, 95, count)
    y = torch.full((count,), torch.nan)
    library.executorch_mlx_silu(at(x), at(y), ctypes.c_int64(count))
    torch.testing.assert_close(y, torch.nn.functional.silu(x.double()).float(), **FEW_ULPS)


def test_silu_of_what_is_no_number(library):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38, -3e38, 1e-40])
    y = torch.empty_like(x)
    library.executorch_mlx_silu(at(x), at(y), ctypes.c_int64(len(x)))
    torch.testing.assert_close(y, torch.nn.functional.silu(x), equal_nan=True)
    assert y[4].signbit()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 17), (2, 128), (300, 1024), (5, 1030)])
def test_rms_norm(library, rows, width, weighted):
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randn(rows, width, generator=generator) * 3
    weight = torch.randn(width, generator=generator) if weighted else None
    y = torch.empty_like(x)
    numbers = (ctypes.c_int64(rows), ctypes.c_int64(width), ctypes.c_float(1e-5))
    library.executorch_mlx_rms_norm(at(x), at(weight), at(y), *numbers)
    expected = torch.nn.functional.rms_norm(x, [width], weight, 1e-5)
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("periods", [True, False])
@pytest.mark.parametrize("layout", ["rows", "heads apart", "numbers apart"])
@pytest.mark.parametrize("offsets", [[7], [0, 30, 2000]])
def test_rope(library, layout, offsets, periods):
    batch, heads, tokens, width, half = 3, 2, 9, 24, 8
    generator = torch.Generator().manual_seed(0)
    # The axes in the order of memory, and where they are afterwards.
    order = {"rows": (0, 1, 2, 3), "heads apart": (0, 2, 1, 3), "numbers apart": (3, 0, 2, 1)}[layout]
    extents = [(batch, heads, tokens, width)[axis] for axis in order]
    x = torch.randn(extents, generator=generator).permute([order.index(axis) for axis in range(4)])
    given = torch.rand(half, generator=generator) * 50 + 1 if periods else None
    start, y = torch.tensor(offsets, dtype=torch.int32), torch.empty(batch, heads, tokens, width)
    rope = Rope(
        at(x), (ctypes.c_int64 * 4)(*x.stride()), batch, heads, tokens, width, half, at(start), len(offsets) > 1,
        at(given), 100.0, 0.5, at(y),
    )
    library.executorch_mlx_rope(ctypes.byref(rope))

    given = 100.0 ** (torch.arange(half) / half) if given is None else given
    position = (start.expand(batch)[:, None] + torch.arange(tokens)) * 0.5
    angles = position[:, None, :, None].double() / given.double()
    left, right, rest = x.double().split([half, half, width - 2 * half], -1)
    turned = (left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos(), rest)
    torch.testing.assert_close(y.double(), torch.cat(turned, -1), rtol=1e-4, atol=3e-4)


def in_memory(generator, extents, layout):
    """Random numbers [batch, heads, rows, columns], the axes of which lie in memory as `layout` says."""
    order = {"rows": (0, 1, 2, 3), "heads apart": (0, 2, 1, 3), "numbers apart": (0, 1, 3, 2)}[layout]
    x = torch.randn([extents[axis] for axis in order], generator=generator)
    return x.permute([order.index(axis) for axis in range(4)])


def attended(library, q, k, v, causal=False, mask=None, scale=0.5):
    scores, y = (*q.shape[:3], k.shape[2]), torch.full((*q.shape[:3], v.shape[3]), torch.nan)
    mask = None if mask is None else mask.expand(scores)
    is_bool = mask is not None and mask.dtype == torch.bool
    strides = [(ctypes.c_int64 * 4)(*x.stride()) for x in (q, k, v)]
    matrices = (part for x, stride in zip((q, k, v), strides, strict=True) for part in (at(x), stride))
    extents = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    of_mask = (ctypes.c_int64 * 4)(*(mask.stride() if mask is not None else ()))
    masks = (at(mask) if is_bool else None, None if is_bool else at(mask), of_mask)
    attention = Attention(*matrices, *extents, causal, *masks, scale, at(y))
    library.executorch_mlx_attention(ctypes.byref(attention))
    return y


MASKS = {
    "none": lambda g, queries, keys: {},
    "causal": lambda g, queries, keys: {"causal": True},
    "bool": lambda g, queries, keys: {"mask": torch.rand(2, 1, queries, keys, generator=g) > 0.5},
    "added": lambda g, queries, keys: {"mask": torch.randn(6, queries, keys, generator=g)},
    "added to all": lambda g, queries, keys: {"mask": torch.randn(queries, 1, generator=g)},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", ["rows", "heads apart", "numbers apart"])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 300), (3, 17), (150, 150), (5, 2000)])
def test_attention(library, queries, keys, layout, mask):
    generator = torch.Generator().manual_seed(queries)
    q = in_memory(generator, (2, 6, queries, 24), layout)
    k, v = (in_memory(generator, (2, 3, keys, columns), layout) for columns in (24, 10))
    given = mask(generator, queries, keys)
    y = attended(library, q, k, v, **given)

    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.5
    if given.get("causal"):
        given["mask"] = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if "mask" in given and given["mask"].dtype == torch.bool:
        # A query that sees nothing sees all alike, as MLX has it.
        scores = torch.where(given["mask"], scores, torch.finfo(torch.float32).min)
    elif "mask" in given:
        scores = scores + given["mask"]
    expected = scores.softmax(-1) @ v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=5e-6)


def test_attention_of_more_queries_than_keys(library):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, rows, 8, generator=generator) for rows in (40, 30))
    y = attended(library, q, k, k, causal=True)
    torch.testing.assert_close(y[0, 0, :10], k[0, 0].mean(0).expand(10, 8), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[0, 0, 10], k[0, 0, 0])


def test_attention_to_what_is_no_number(library):
    q, k = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 20, 8)
    mask = torch.zeros(4, 20)
    mask[0], mask[1, 3], mask[2, :19] = -torch.inf, torch.nan, -torch.inf
    y = attended(library, q, k, torch.arange(20.0).reshape(1, 1, 20, 1), mask=mask)[0, 0, :, 0]
    assert y[:2].isnan().all() and y[2:].tolist() == [19, 9.5]
