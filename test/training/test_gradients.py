"""Gradients of small models in exported programs equal those of eager torch."""

import pytest
import torch
from executorch_mlx.training import cross_entropy, jvp, mean_squared_error, vjp
from models.model_case import randomize
from torch import nn
from torch.nn import functional as F

from .exported import Gradients, assert_close, run


class Attention(nn.Module):
    """Causal attention with rotary embeddings and grouped heads, a norm before, and a gated layer after it."""

    def __init__(self, width=16, heads=4, key_heads=2):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(12, width), nn.RMSNorm(width)
        self.heads, self.key_heads, size = heads, key_heads, width // heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * key_heads * size)
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1]))

    def rotate(self, x):
        angles = torch.arange(x.shape[2]).unsqueeze(1) * self.frequencies
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2 * self.key_heads, -1)).transpose(1, 2).chunk(2, 1)
        a = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + a.transpose(1, 2).flatten(-2)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return x @ self.embedding.weight.T


class Experts(nn.Module):
    """A mixture of experts: the two best of four, by gather and scatter."""

    def __init__(self, width=8, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.weight = nn.Parameter(torch.randn(experts, width, width))

    def forward(self, x):
        chosen, index = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros(x.shape[0], 4).scatter(1, index, chosen / chosen.sum(-1, keepdim=True))
        return torch.einsum("nk,ekm,ne->nm", x, self.weight, weights)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0])


class Pooled(nn.Module):
    """Convolutions of all kinds, poolings, resamplings and paddings."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.grouped = nn.Conv2d(8, 4, 3, groups=2)
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = F.max_pool2d(self.depthwise(x), 2, 1)
        x = F.avg_pool2d(F.gelu(self.grouped(x)), 2, 1)
        x = self.norm(self.up(x))
        x = F.interpolate(x, scale_factor=2, mode="bilinear") + F.interpolate(x, scale_factor=2, mode="nearest")
        x = F.pad(F.pad(x, (1, 2, 0, 1), "reflect"), (1, 1, 2, 0), "replicate")
        return F.adaptive_avg_pool2d(x, 3).flatten(1)


class Bag(nn.Module):
    """Reads and writes by index."""

    def __init__(self):
        super().__init__()
        self.embedding, self.table = nn.Embedding(7, 5, padding_idx=0), nn.Parameter(torch.randn(6, 5))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.table[tokens % 6]
        x = x.index_put((torch.tensor([0, 2]),), self.table[:1])
        return x.cumsum(1).gather(2, tokens.unsqueeze(-1) % 5) * x.amax(-1, keepdim=True)


def tokens(*shape, high=7):
    return torch.randint(0, high, shape)


def against(shape):
    return lambda module, x: mean_squared_error(module(x), torch.linspace(-1, 1, 6)[: shape[-1]].expand(shape))


def next_token(module, x):
    return cross_entropy(module(x)[:, :-1], x[:, 1:], x[:, 1:] > 2)


def squares(module, x):
    return module(x).square().mean()


FAMILIES = {
    "attention": (Attention, lambda: tokens(2, 6, high=12), next_token),
    "batch norm": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), (2, 3, 8), squares),
    "bag": (Bag, lambda: tokens(3, 4), squares),
    "conv and pool": (Pooled, (2, 3, 16, 15), squares),
    "conv 3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.MaxPool3d(2), nn.Flatten()), (1, 2, 5, 5, 5), squares),
    "experts": (Experts, (5, 8), squares),
    "gru": (lambda: Recurrent(nn.GRU), (2, 4, 6), squares),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 4, 6), squares),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True), (2, 4, 8), squares),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU("tanh"), nn.Linear(8, 3), nn.Softmax(-1)),
        (5, 4),
        against((5, 3)),
    ),
    "activations": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Hardswish(), nn.Softplus(), nn.Mish(), nn.ELU(), nn.GLU()),
        (3, 4),
        squares,
    ),
    "classifier": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LogSoftmax(-1)),
        (6, 4),
        lambda module, x: F.nll_loss(module(x), torch.arange(6) % 5),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    torch.manual_seed(0)
    make, x, loss = FAMILIES[family]
    module = make().eval()
    randomize(module)
    x = torch.randn(x) if isinstance(x, tuple) else x()
    gradients = Gradients(module, loss)
    expected = gradients(x)
    assert all(g.abs().max() > 0 for g in expected)
    assert_close(run(gradients, (x,)), expected, 1e-4)


def test_bfloat16():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 4)).bfloat16()
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    gradients = Gradients(module, squares)
    assert_close(run(gradients, (x,)), gradients(x), 0.03)


class Products(nn.Module):
    def forward(self, x, y):
        def function(x, y):
            return (x.sin() @ y).exp(), x * 2

        (first, second), pull = vjp(function, x, y)
        (_, _), (tangent, _) = jvp(function, (x, y), (y.mT.contiguous(), x.mT.contiguous()))
        return *pull((first, second + 1)), tangent, first


def test_products_with_the_jacobian():
    torch.manual_seed(0)
    args = torch.randn(3, 4), torch.randn(4, 3)
    assert_close(run(Products(), args), Products()(*args), 1e-5)


@pytest.mark.parametrize("names", [[], ["weight", "missing"]])
def test_unknown_names_are_an_error(names):
    from executorch_mlx.training import value_and_grad

    with pytest.raises(ValueError, match="value_and_grad: names: got (none|missing), expected"):
        value_and_grad(nn.Linear(2, 2), squares, names)
