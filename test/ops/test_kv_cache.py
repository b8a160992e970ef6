"""KV caches in mutable buffers, and attention over them."""

import pytest
import torch
from oprows import Dyn, f32, floats, ints, pytest_function, row

N = Dyn("n", 3, also=(1, 7))
M = Dyn("m", 3, also=(1, 5))
SDPA = ("SdpaNode",)


class CachedAttention(torch.nn.Module):
    """Writes keys and values from position `start` on, then attends. With `rows`, takes the rows as well."""

    def __init__(self, kv_heads, capacity=16, rows=1, **options):
        super().__init__()
        self.rows, self.options = rows, options
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, kv_heads, rows * capacity, 8))

    def forward(self, query, key, value, start, row=None):
        ring = "window" in self.options
        for name, update in (("keys", key), ("values", value)):
            cache = getattr(self, name)
            cache.copy_(torch.ops.mlx.cache_update(cache, update, start, ring, row, self.rows))
        return torch.ops.mlx.cached_attention(
            query, self.keys, self.values, start, 8**-0.5, **self.options, row=row, rows=self.rows
        )


def cached(variant, module, *inputs, **options):
    return row(f"mlx::cached_attention{variant}", module, *inputs,
               **{"dtypes": (f32,), "loose": 10, "nodes": SDPA, **options})


def qkv(length, query=4, kv=2):
    """Query, key and value for `length` positions."""
    return floats(1, query, length, 8), floats(1, kv, length, 8), floats(1, kv, length, 8)


CAP = {"softcap": 2.0}
RING = {"capacity": 10, "window": 6}  # chunks of up to 5 positions
ROW = ints(1, low=0, high=3)
# A position and a row for each of four tokens. Rows repeat.
EACH, ROWS_OF_EACH = ints(4, low=0, high=16), ints(4, low=0, high=3)

ROWS = [
    cached("", CachedAttention(4), *qkv(3, kv=4), ints(low=0, high=13), calls=3),
    cached("/grouped, dynamic", CachedAttention(2), *qkv(N), ints(low=0, high=9)),
    cached("/softcap", CachedAttention(2, **CAP), *qkv(N), ints(low=0, high=9), nodes=()),
    cached("/ring", CachedAttention(2, **RING), *qkv(M), ints(low=0, high=100), calls=4),
    cached("/ring, one", CachedAttention(2, **RING), *qkv(1), ints(low=0, high=100), calls=4),
    cached("/row", CachedAttention(2, rows=3), *qkv(N), ints(1, low=0, high=9), ROW, calls=4),
    cached("/row, ring", CachedAttention(2, rows=3, **RING), *qkv(M), ints(1, low=0, high=100), ROW, calls=4),
    cached("/rows", CachedAttention(2, rows=3), *qkv(4), EACH, ROWS_OF_EACH, calls=4),
    cached("/rows, softcap", CachedAttention(2, rows=3, **CAP), *qkv(4), EACH, ROWS_OF_EACH, calls=4, nodes=()),
    cached("/rows, ring, softcap", CachedAttention(2, rows=3, **RING, **CAP), *qkv(4),
           ints(4, low=0, high=100), ROWS_OF_EACH, calls=4, nodes=()),
]

test_op_row = pytest_function(ROWS)


@pytest.mark.parametrize("options", [{}, CAP], ids=["plain", "softcap"])
@pytest.mark.parametrize("chunks", [(5, 5, 5, 5), (1,) * 20, (5, 1, 1, 4, 3, 5, 1)])
def test_ring_buffer_equals_attention_with_a_band_mask(options, chunks):
    total, window = sum(chunks), RING["window"]
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, total, 8), torch.randn(1, 2, total, 8), torch.randn(1, 2, total, 8)
    band = torch.ones(total, total, dtype=torch.bool).tril().triu(1 - window)
    keys, values = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ keys.transpose(2, 3) * 8**-0.5
    if options:
        scores = 2.0 * torch.tanh(scores / 2.0)
    expected = scores.masked_fill(~band, -torch.inf).softmax(-1) @ values

    ring, start, outputs = CachedAttention(2, **RING, **options), 0, []
    for length in chunks:
        part = slice(start, start + length)
        outputs.append(ring(query[:, :, part], key[:, :, part], value[:, :, part], torch.tensor([start])))
        start += length
    torch.testing.assert_close(torch.cat(outputs, 2), expected)


def test_ring_buffer_smaller_than_the_window_raises():
    ring = CachedAttention(2, **RING)
    update = torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match="got a capacity of 10 positions, expected at least"):
        ring(torch.zeros(1, 4, 6, 8), update, update, torch.tensor([20]))
