"""Scaled dot-product attention, alone and over a cache."""

import torch
from oprows import Dyn, bools, f32, floats, ints, row, checks
from torch.nn.functional import scaled_dot_product_attention as sdpa

N = Dyn("n", 3, also=(1, 7))
ONE = (f32,)
LOOSE = 4
Q, K = floats(2, 4, 5, 8), floats(2, 4, 5, 8)
LONG = floats(2, 4, 7, 8)
GROUPED = floats(2, 2, 5, 8)
FUSED = ("SdpaNode",)


def attention(variant, fn, *inputs, **options):
    return row(f"scaled_dot_product_attention{variant}", fn, *inputs,
               **{"loose": LOOSE, "fused": FUSED, **options})


def first_column(mask):
    """No row without a key: what attention to nothing gives is not defined."""
    return mask | (torch.arange(mask.shape[-1]) == 0)


class CachedAttention(torch.nn.Module):
    def __init__(self, kv_heads):
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, kv_heads, 16, 8))

    def forward(self, query, key, value, start):
        self.keys.copy_(torch.ops.mlx.kv_cache_update(self.keys, key, start))
        self.values.copy_(torch.ops.mlx.kv_cache_update(self.values, value, start))
        return torch.ops.mlx.cached_attention(query, self.keys, self.values, start, 8**-0.5)


ROWS = [
    attention("", sdpa, Q, K, floats(2, 4, 5, 8)),
    attention("/causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), Q, K, floats(2, 4, 5, 8)),
    attention("/causal, more keys", lambda q, k, v: sdpa(q, k, v, is_causal=True), Q, LONG, LONG),
    attention("/causal, more queries", lambda q, k, v: sdpa(q, k, v, is_causal=True), LONG, Q, Q),
    attention("/bool mask", lambda q, k, v, m: sdpa(q, k, v, first_column(m)), Q, LONG, LONG, bools(2, 1, 5, 7)),
    attention("/additive mask", sdpa, Q, LONG, LONG, floats(5, 7)),
    attention("/scale", lambda q, k, v: sdpa(q, k, v, scale=0.3), Q, K, floats(2, 4, 5, 8), dtypes=ONE),
    attention("/grouped", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), Q, GROUPED, GROUPED),
    attention("/3-d", sdpa, floats(2, 5, 8), floats(2, 7, 8), floats(2, 7, 8), dtypes=ONE),
    attention("/3-d mask", sdpa, floats(2, 5, 8), floats(2, 7, 8), floats(2, 7, 8), floats(2, 5, 7), dtypes=ONE),
    attention("/wider values", sdpa, Q, K, floats(2, 4, 5, 6), dtypes=ONE),
    attention("/dynamic", lambda q, k, v: sdpa(q, k, v, is_causal=True),
              floats(1, 2, N, 8), floats(1, 2, N, 8), floats(1, 2, N, 8), dtypes=ONE),
    row("mlx::cached_attention", CachedAttention(4), floats(1, 4, 3, 8), floats(1, 4, 3, 8), floats(1, 4, 3, 8),
        ints(low=0, high=13), dtypes=ONE, calls=3, fused=FUSED, loose=10),
    row("mlx::cached_attention/grouped, dynamic", CachedAttention(2), floats(1, 4, N, 8), floats(1, 2, N, 8),
        floats(1, 2, N, 8), ints(low=0, high=9), dtypes=ONE, fused=FUSED, loose=10),
]

test_row = checks(ROWS)
