"""Caches in mutable buffers, and attention over them."""

import pytest
import torch
from oprows import Dyn, checks, f32, floats, ints, row

N = Dyn("n", 3, also=(1, 7))
M = Dyn("m", 3, also=(1, 5))
FUSED = ("SdpaNode",)


class CachedAttention(torch.nn.Module):
    """Writes keys and values at `start`, then attends."""

    def __init__(self, kv_heads, capacity=16, batch=1, **options):
        super().__init__()
        self.options = options
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, kv_heads, capacity, 8))

    def forward(self, query, key, value, start, *first):
        ring = "window" in self.options
        for name, rows in (("keys", key), ("values", value)):
            cache = getattr(self, name)
            cache.copy_(torch.ops.mlx.cache_update(cache, rows, start, ring))
        return torch.ops.mlx.cached_attention(
            query, self.keys, self.values, start, 8**-0.5, *first, **self.options
        )


def cached(variant, module, *inputs, **options):
    return row(f"mlx::cached_attention{variant}", module, *inputs,
               **{"dtypes": (f32,), "loose": 10, "fused": FUSED, **options})


def heads(rows, query=4, kv=2, batch=1):
    return floats(batch, query, rows, 8), floats(batch, kv, rows, 8), floats(batch, kv, rows, 8)


CAP = {"softcap": 2.0}
RING = {"capacity": 10, "window": 6}  # room for calls of 5

ROWS = [
    cached("", CachedAttention(4), *heads(3, kv=4), ints(low=0, high=13), calls=3),
    cached("/grouped, dynamic", CachedAttention(2), *heads(N), ints(low=0, high=9)),
    cached("/softcap", CachedAttention(2, **CAP), *heads(N), ints(low=0, high=9), fused=()),
    cached("/padding", CachedAttention(2, batch=2), *heads(N, batch=2), ints(low=0, high=9), ints(2, low=0, high=7)),
    cached("/ring", CachedAttention(2, **RING), *heads(M), ints(low=0, high=100), calls=4),
    cached("/ring, one", CachedAttention(2, **RING), *heads(1), ints(low=0, high=100), calls=4),
    cached("/ring, softcap, padding", CachedAttention(2, batch=2, **RING, **CAP), *heads(M, batch=2),
           ints(low=0, high=100), ints(2, low=0, high=7), calls=4, fused=()),
]

test_row = checks(ROWS)


@pytest.mark.parametrize("options", [{}, CAP], ids=["plain", "softcap"])
@pytest.mark.parametrize("pieces", [(5, 5, 5, 5), (1,) * 20, (5, 1, 1, 4, 3, 5, 1)])
def test_a_ring_is_attention_through_a_window(options, pieces):
    """Against attention over everything, with a banded mask."""
    total, window = sum(pieces), RING["window"]
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, total, 8), torch.randn(1, 2, total, 8), torch.randn(1, 2, total, 8)
    band = torch.ones(total, total, dtype=torch.bool).tril().triu(1 - window)
    keys, values = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ keys.transpose(2, 3) * 8**-0.5
    if options:
        scores = 2.0 * torch.tanh(scores / 2.0)
    expected = scores.masked_fill(~band, -torch.inf).softmax(-1) @ values

    ring, start, answers = CachedAttention(2, **RING, **options), 0, []
    for length in pieces:
        part = slice(start, start + length)
        answers.append(ring(query[:, :, part], key[:, :, part], value[:, :, part], torch.tensor([start])))
        start += length
    torch.testing.assert_close(torch.cat(answers, 2), expected)


def test_a_ring_too_small_for_its_window_is_an_error():
    ring = CachedAttention(2, **RING)
    rows = torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match="outside a cache of 10"):
        ring(torch.zeros(1, 4, 6, 8), rows, rows, torch.tensor([20]))
