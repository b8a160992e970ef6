"""Operators of training steps whose gradient is one operator, and these gradients."""

import torch
from executorch_mlx.custom_ops import training
from oprows import bools, f32, floats, indices, pytest_function, row
from torch.nn import functional as F

Q, KV = floats(2, 4, 5, 8), floats(2, 2, 5, 8)
LONG = floats(2, 2, 7, 8)
MASK = bools(2, 1, 5, 7)


def attention_gradients(q, k, v, mask, is_causal, scale):
    """The gradients for the sum of the results, times different numbers, and the result."""
    grad = torch.linspace(-1, 1, 5).unsqueeze(-1).to(q.dtype) * torch.ones_like(q)
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
        grad = torch.where(allowed.any(-1, keepdim=True), grad, 0.0)
    out = torch.ops.mlx.attention(q, k, v, mask, is_causal, scale)
    return out, *torch.ops.mlx.attention_gradients(grad, q, k, v, mask, is_causal, scale)


def unseen(q, k, v, mask):
    """The first query of each head sees no key."""
    mask = mask & (torch.arange(5) > 0).unsqueeze(-1)
    results = attention_gradients(q, k, v, mask, False, 0.5)
    return *results, *attention_gradients(q, k, v, torch.where(mask, 0.0, -torch.inf).to(q.dtype), False, 0.5)


ATTENTION = [
    row("mlx::attention", cases=[(Q, KV, KV, None, True, 0.5), (Q, LONG, LONG, MASK, False, 0.5)], loose=4),
    row(
        "mlx::attention_gradients",
        attention_gradients,
        cases=[(Q, Q, Q, None, True, 0.5), (Q, KV, KV, None, False, 0.3), (Q, LONG, LONG, None, True, 0.5)],
        loose=8,
        loose_half=4,
        nodes=["SdpaGradientsNode"],
    ),
    row("mlx::attention_gradients/unseen", unseen, Q, LONG, LONG, MASK, loose=8, loose_half=4),
]

NORM = [
    row("mlx::rms_norm", floats(2, 3, 8), floats(8), 1e-5, loose=4),
    row(
        "mlx::rms_norm_gradient",
        cases=[(floats(2, 3, 8), floats(2, 3, 8), 1e-5), (floats(6), floats(6), 0.5)],
        loose=4,
        nodes=["RMSNormGradientNode"],
    ),
]

SILU = [row("mlx::silu_gradient", floats(3, 8), floats(3, 8), loose=4, nodes=["SiluGradientNode"])]

LOSS = [
    row("mlx::cross_entropy", floats(2, 3, 9), indices(2, 3, below=9), loose=4, nodes=["CrossEntropyNode"]),
    row(
        "mlx::cross_entropy_gradient",
        cases=[
            (floats(2, 3, dtype=f32), floats(2, 3, 9), indices(2, 3, below=9)),
            (floats(dtype=f32), floats(9), indices(below=9)),
        ],
        loose=4,
        nodes=["CrossEntropyGradientNode"],
    ),
]

ROWS = [*ATTENTION, *NORM, *SILU, *LOSS]
test_op_row = pytest_function(ROWS)


def gradients(function, *tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


def test_gradients_are_those_of_autograd():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    mask = torch.rand(2, 1, 5, 5, generator=generator) > 0.5
    mask[0, 0, 1] = False
    for kind in (None, mask, torch.where(mask, 0.5, -torch.inf)):
        causal = kind is None
        options = {"attn_mask": kind, "is_causal": causal, "scale": 0.4, "enable_gqa": True}
        expected = gradients(lambda *qkv: F.scaled_dot_product_attention(*qkv, **options), q, k, v)
        actual = gradients(lambda q, k, v: training.attention(q, k, v, kind, causal, 0.4), q, k, v)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    x, weight = torch.randn(3, 4, 8, generator=generator), torch.randn(8, generator=generator)
    expected = gradients(lambda x, weight: F.rms_norm(x, [8], weight, 1e-3), x, weight)
    actual = gradients(lambda x, weight: training.rms_norm(x, weight, 1e-3), x, weight)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    targets = torch.tensor([[1, 0, 7, 3], [2, 2, 2, 2], [5, 6, 7, 0]])
    expected = gradients(lambda x: F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="none"), x)
    torch.testing.assert_close(gradients(lambda x: training.cross_entropy(x, targets), x), expected)
