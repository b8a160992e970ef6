"""RMSNorm, SiLU and rotary embedding in one pass over memory, by the kernels of every instruction set."""

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
