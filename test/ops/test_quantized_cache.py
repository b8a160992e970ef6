"""Quantized KV caches: the extensions that fuse attention over them, and the lowering without extensions."""

import pytest
import torch
from executorch_mlx.custom_ops.quantized_cache import EntryFormat, dequantize, hadamard, quantize
from oprows import Dyn, bf16, f16, f32, floats, ints, pytest_function, row

N = Dyn("n", 3, also=(1, 7))
M = Dyn("m", 3, also=(1, 5))
HEAD_SIZE = 40  # fills two groups of 32, the second with 8 numbers and 24 zeros
CAPACITY = 16
FUSED = ("QuantizeEntriesNode", "QuantizedSdpaNode")
UNROTATED = EntryFormat(32, 8, False)
ROTATED = EntryFormat(32, 4, True)
GROUPS_OF_64 = EntryFormat(64, 8, True)


class QuantizedAttention(torch.nn.Module):
    """Writes keys and values from position `start` on, then attends.

    If `value_size` is None, the values are the first 33 numbers of the keys.
    """

    def __init__(self, format, capacity=CAPACITY, rows=1, value_size=HEAD_SIZE, dtype=f32, **options):
        super().__init__()
        self.format, self.rows, self.value_size, self.options = format, rows, value_size, options
        groups = format.groups(HEAD_SIZE) + format.groups(value_size or 0)
        self.register_buffer("entries", torch.zeros(1, 2, rows * capacity, format.bytes(groups), dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(1, 2, rows * capacity, 2 * groups, dtype=dtype))

    def forward(self, query, key, value, start, row=None):
        format_arguments = self.format.group_size, self.format.bits, self.format.rotate
        tensors = [key, value] if self.value_size else [key + 0 * value]
        new = torch.ops.mlx.quantize_entries(tensors, *format_arguments, self.scales.dtype)
        for cache, update in zip((self.entries, self.scales), new):
            written = torch.ops.mlx.cache_update(cache, update, start, "window" in self.options, row, self.rows)
            cache.copy_(written)
        offset = self.format.groups(HEAD_SIZE) * self.format.group_size if self.value_size else 0
        return torch.ops.mlx.quantized_attention(
            query, self.entries, self.scales, start, 0.2, offset, self.value_size or 33, *format_arguments,
            **self.options, row=row, rows=self.rows,
        )


def fused(variant, module, *inputs, **options):
    return row(f"mlx::quantized_attention{variant}", module, *inputs,
               **{"dtypes": (f32,), "loose": 20, "nodes": FUSED, "edge_verified": False, **options})


def plain(variant, module, *inputs):
    return fused(f"/plain{variant}", module, *inputs, nodes=())


def qkv(length):
    return floats(1, 4, length, HEAD_SIZE), floats(1, 2, length, HEAD_SIZE), floats(1, 2, length, HEAD_SIZE)


RING = {"capacity": 10, "window": 6}  # chunks of up to 5 positions
ROW = ints(1, low=0, high=3)
# For calls with four tokens: the position of each token, and its row of the cache.
TOKEN_POSITIONS, TOKEN_ROWS = ints(4, low=0, high=16), ints(4, low=0, high=3)

ROWS = [
    fused("", QuantizedAttention(UNROTATED), *qkv(3), ints(low=0, high=13), calls=3),
    fused("/rotated, dynamic", QuantizedAttention(ROTATED), *qkv(N), ints(low=0, high=9)),
    fused("/groups of 64", QuantizedAttention(GROUPS_OF_64), *qkv(N), ints(low=0, high=9)),
    fused("/ring", QuantizedAttention(UNROTATED, **RING), *qkv(M), ints(low=0, high=100), calls=4),
    fused("/rows", QuantizedAttention(ROTATED, rows=3), *qkv(4), TOKEN_POSITIONS, TOKEN_ROWS, calls=4),
    fused("/row", QuantizedAttention(UNROTATED, rows=3), *qkv(N), ints(1, low=0, high=9), ROW, calls=4),
    fused("/values in the keys", QuantizedAttention(ROTATED, value_size=None), *qkv(N), ints(low=0, high=9)),
    fused("/softcap", QuantizedAttention(UNROTATED, softcap=2.0), *qkv(N), ints(low=0, high=9), nodes=FUSED[:1]),
    plain("", QuantizedAttention(UNROTATED), *qkv(N), ints(low=0, high=9)),
    plain("/4 bits, rotated", QuantizedAttention(ROTATED), *qkv(N), ints(low=0, high=9)),
    plain("/ring, rows", QuantizedAttention(ROTATED, rows=3, **RING), *qkv(4), ints(4, low=0, high=100), TOKEN_ROWS),
    row("mlx::quantize_entries/scales",
        lambda x, y: torch.ops.mlx.quantize_entries([x, y], 32, 8, False, torch.float32)[1],
        floats(1, 2, 3, HEAD_SIZE), floats(1, 2, 3, 7), dtypes=(f32, f16, bf16), nodes=FUSED[:1], edge_verified=False),
]

test_op_row = pytest_function(ROWS)


@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("format", [UNROTATED, ROTATED, GROUPS_OF_64, EntryFormat(128, 4, False)])
def test_the_error_is_bounded_by_the_scale(format, dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 2, 5, width, generator=generator) for width in (200, 33))
    y[:, :, 2] = 3.0  # a constant group
    y[:, :, 3] = 0.0
    entries, scales = quantize([x, y], format, dtype)
    first_group = 0
    for tensor in (x, y):
        width = tensor.shape[-1]
        restored = dequantize(entries, scales, first_group, width, format, f32)
        largest_scale = scales[..., first_group : first_group + format.groups(width)].float().amax()
        # Without a rotation, quantization changes a number by at most half a scale. A rotation spreads the errors of a
        # group over its numbers. In half precision, the scale is rounded too.
        slack = (format.group_size**0.5 if format.rotate else 1) * (1 if dtype == f32 else 3)
        assert (restored - tensor).abs().max() <= 0.51 * largest_scale * slack
        first_group += format.groups(width)


def test_hadamard_is_its_own_inverse():
    for size in (32, 64, 128):
        torch.testing.assert_close(hadamard(size) @ hadamard(size), torch.eye(size))


@pytest.mark.parametrize("bits, group_size", [(3, 32), (8, 16), (4, 33)])
def test_formats_are_checked(bits, group_size):
    with pytest.raises(ValueError, match="expected 4 or 8 bits in groups of 32, 64 or 128"):
        torch.ops.mlx.quantize_entries([torch.zeros(1, 1, 1, 64)], group_size, bits, False, f32)
