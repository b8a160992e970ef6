"""Fusions: the fused node is in the payload, and gives what the spelled-out text gives."""

import pytest
import torch
from oprows import Dyn, bf16, f16, f32, floats, ints, lower, row, run_in_process

FLOATS = (f32, f16, bf16)
N = Dyn("n", 3, also=(1, 7))


class RMSNorm(torch.nn.Module):
    """As the Llama of Hugging Face spells it: in float32 inside, the weight outside."""

    def __init__(self, square, weight_first):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.square = square
        self.weight_first = weight_first

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(self.square(x).mean(-1, keepdim=True) + 1e-5)
        x = x.to(dtype)
        return self.weight * x if self.weight_first else x * self.weight


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Rotary(torch.nn.Module):
    """As the Llama of Hugging Face spells it; queries and keys share cos and sin."""

    def __init__(self, dim=8):
        super().__init__()
        frequencies = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def _apply(self, fn, recurse=True):
        return self  # the frequencies stay in float32, whatever the model is cast to

    def forward(self, query, key, start):
        position_ids = (torch.arange(query.shape[2]) + start)[None]
        freqs = position_ids[..., None].float() * self.inv_freq.to(dtype=torch.float)
        angles = torch.cat((freqs, freqs), dim=-1)
        cos = (angles.cos() * 1.0).to(query.dtype)[:, None]
        sin = (angles.sin() * 1.0).to(query.dtype)[:, None]
        return (
            query * cos + rotate_half(query) * sin,
            key * cos + rotate_half(key) * sin,
        )


def repeat_kv(x, times):
    batch, heads, length, dim = x.shape
    x = x[:, :, None].expand(batch, heads, times, length, dim)
    return x.reshape(batch, heads * times, length, dim)


def grouped_attention(query, key, value):
    times = query.shape[1] // key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, times), repeat_kv(value, times), is_causal=True
    )


def ops_of(lowered):
    return [
        i.op.NAME for g in lowered.graphs for c in g.instruction_chains for i in c.instructions
    ]


def check(case):
    lowered = lower(case)
    run_in_process(case, lowered)
    return ops_of(lowered)


SQUARES = {"pow": lambda x: x.pow(2), "mul": lambda x: x * x}


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("weight_first", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rms_norm(delegate, square, weight_first, dtype):
    module = RMSNorm(SQUARES[square], weight_first)
    case = row("program/rms", module, floats(2, N, 8), dtypes=[dtype], loose=2)
    assert check(case) == ["RMSNormNode"]


def test_a_norm_that_is_read_inside_stays_spelled_out(delegate):
    def norm(x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x * scale, scale

    case = row("program/read inside", norm, floats(2, 8), dtypes=[f32])
    assert "RMSNormNode" not in check(case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rope(delegate, dtype):
    case = row("program/rope", Rotary(), floats(1, 4, N, 8), floats(1, 2, N, 8), ints(1, low=0, high=9),
               dtypes=[dtype], loose=2)
    assert check(case).count("RopeNode") == 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_grouped_attention(delegate, dtype):
    case = row("program/attention", grouped_attention, floats(1, 4, 5, 8), floats(1, 2, 5, 8),
               floats(1, 2, 5, 8), dtypes=[dtype], loose=4)
    ops = check(case)
    assert ops == ["SdpaNode"], ops


def test_grouped_attention_dynamic(delegate):
    case = row("program/attention dynamic", grouped_attention, floats(1, 4, N, 8), floats(1, 2, N, 8),
               floats(1, 2, N, 8), dtypes=[f32], loose=4)
    ops = check(case)
    assert "SdpaNode" in ops and "BroadcastToNode" not in ops, ops
