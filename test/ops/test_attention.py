"""Scaled dot-product attention."""

import torch
from oprows import Dyn, bools, f32, floats, pytest_function, row
from torch.nn.functional import scaled_dot_product_attention as sdpa

N = Dyn("n", 3, also=(1, 7))
KEYS = Dyn("keys", 3, also=(5, 2))
F32_ONLY = (f32,)
LOOSE = 4
Q, K = floats(2, 4, 5, 8), floats(2, 4, 5, 8)
LONG = floats(2, 4, 7, 8)
GROUPED = floats(2, 2, 5, 8)
SDPA = ("SdpaNode",)


def attention(variant, fn, *inputs, **options):
    return row(f"scaled_dot_product_attention{variant}", fn, *inputs, **{"loose": LOOSE, "nodes": SDPA, **options})


def first_query_masked(mask):
    """Return `mask` with every key of the first query masked. torch returns zeros for such a query."""
    return mask & (torch.arange(mask.shape[-2]) != 0)[:, None]


def additive(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))


ROWS = [
    attention("", sdpa, Q, K, floats(2, 4, 5, 8)),
    attention("/causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), Q, K, floats(2, 4, 5, 8)),
    attention("/causal, more keys", lambda q, k, v: sdpa(q, k, v, is_causal=True), Q, LONG, LONG),
    attention("/causal, more queries", lambda q, k, v: sdpa(q, k, v, is_causal=True), LONG, Q, Q),
    attention("/bool mask", lambda q, k, v, m: sdpa(q, k, v, first_query_masked(m)), Q, LONG, LONG, bools(2, 1, 5, 7)),
    attention("/bool mask for each key", sdpa, Q, LONG, LONG, bools(2, 4, 1, 7), dtypes=F32_ONLY),
    attention(
        "/-inf mask",
        lambda q, k, v, m: sdpa(q, k, v, additive(first_query_masked(m), q.dtype)),
        Q,
        LONG,
        LONG,
        bools(5, 7),
    ),
    attention("/additive mask", sdpa, Q, LONG, LONG, floats(5, 7)),
    attention("/scale", lambda q, k, v: sdpa(q, k, v, scale=0.3), Q, K, floats(2, 4, 5, 8), dtypes=F32_ONLY),
    attention("/grouped", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), Q, GROUPED, GROUPED),
    attention("/grouped, more heads of values", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), Q, GROUPED, K),
    attention("/one batch of keys", sdpa, Q, floats(1, 4, 7, 8), floats(1, 4, 7, 8), dtypes=F32_ONLY),
    attention("/one query head", sdpa, floats(2, 1, 5, 8), LONG, floats(1, 4, 7, 8), dtypes=F32_ONLY),
    attention("/one key head", sdpa, Q, floats(2, 1, 7, 8), LONG, dtypes=F32_ONLY),
    attention("/3-d, one batch of keys", sdpa, floats(2, 5, 8), floats(1, 7, 8), floats(1, 7, 8), dtypes=F32_ONLY),
    attention("/3-d", sdpa, floats(2, 5, 8), floats(2, 7, 8), floats(2, 7, 8), dtypes=F32_ONLY),
    attention("/3-d mask", sdpa, floats(2, 5, 8), floats(2, 7, 8), floats(2, 7, 8), floats(2, 5, 7), dtypes=F32_ONLY),
    attention(
        "/3-d, grouped",
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        floats(4, 5, 8),
        floats(2, 7, 8),
        floats(2, 7, 8),
        dtypes=F32_ONLY,
    ),
    row("program/number as mask", sdpa, floats(2, 5, 8), floats(2, 7, 8), floats(2, 7, 8), floats(), dtypes=F32_ONLY),
    attention("/wider values", sdpa, Q, K, floats(2, 4, 5, 6), dtypes=F32_ONLY),
    attention(
        "/dynamic",
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        floats(1, 2, N, 8),
        floats(1, 2, N, 8),
        floats(1, 2, N, 8),
        dtypes=F32_ONLY,
    ),
    attention("/dynamic head dimension", sdpa, *[floats(1, 2, 4, N)] * 3),
    attention(
        "/causal, dynamic",
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        floats(1, 2, N, 8),
        floats(1, 2, KEYS, 8),
        floats(1, 2, KEYS, 8),
        dtypes=F32_ONLY,
    ),
]

test_op_row = pytest_function(ROWS)
