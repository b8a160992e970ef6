"""Constant folding and peephole optimization."""

import itertools

import pytest
import torch
from executorch_mlx.builder.peephole import can_represent
from oprows import bf16, f16, f32, floats, i32, i64, ints, lower, row, run_in_process

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, i32, i64, f16, bf16, f32)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(3)
        self.norm.running_mean.copy_(torch.tensor([0.1, 0.2, 0.3]))
        self.norm.running_var.copy_(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x):
        return self.norm(x)


class OldValue(torch.nn.Module):
    """Returns the old value of a buffer through views that are computed after the buffer is overwritten."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 3))

    def forward(self, x):
        before = self.state.clone().reshape(6).reshape(3, 2)
        self.state.add_(x)
        return before.reshape(2, 3) * 2


class ScaledWeight(torch.nn.Module):
    """A large weight that is scaled and cast before its use. With `reads_weight`, the program also reads it alone."""

    def __init__(self, reads_weight=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 400 * 300).reshape(400, 300), requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.5, 1, 300))
        self.reads_weight = reads_weight

    def forward(self, x):
        y = x @ (self.weight * self.scale).to(x.dtype)
        return y + self.weight[0] if self.reads_weight else y


def causal_window(x):
    mask = torch.ones(4, 4).tril().bool() & (torch.arange(4)[:, None] - torch.arange(4) < 2)
    return torch.where(mask, x, 0.5)


def attention(mask):
    """Return a function: self-attention with a constant mask, expanded to the size of the batch."""
    return lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, mask.expand(x.shape[0], 1, 4, 4))


# Programs with instructions that are folded away: name → (function, input, expected instructions).
FOLDED = {
    "casts through a wider type": (lambda x: x.to(f32).to(bf16), floats(3, dtype=f16), ["AsTypeNode"]),
    "cast and cast back": (lambda x: x.to(f32).to(f16).exp(), floats(3, dtype=f16), ["ExpNode"]),
    "small integers through float32": (lambda x: x.to(f32).to(i64), ints(3, dtype=torch.int16), ["AsTypeNode"]),
    "permutes": (lambda x: x.permute(1, 2, 0).permute(1, 0, 2).exp(), floats(2, 3, 4), ["TransposeNode", "ExpNode"]),
    "permute and permute back": (lambda x: x.permute(1, 2, 0).permute(2, 0, 1).exp(), floats(2, 3, 4), ["ExpNode"]),
    "views": (lambda x: x.reshape(6, 4)[None].reshape(8, 3), floats(2, 3, 4), ["ReshapeNode"]),
    "view and view back": (lambda x: x.reshape(24).unsqueeze(0).reshape(2, 3, 4).exp(), floats(2, 3, 4), ["ExpNode"]),
    "view and expand to the same shape": (lambda x: x.view(2, 3).expand(2, 3).exp(), floats(2, 3), ["ExpNode"]),
    "factor of one": (lambda x: (x * 1.0 / 1).exp(), floats(3), ["ExpNode"]),
    "summand of zero": (lambda x: (x + 0) * x, ints(3), ["MultiplyNode"]),
    "mask": (causal_window, floats(2, 4, 4), ["WhereNode"]),
    "mask of attention that masks nothing": (attention(torch.ones(1, 4).bool()), floats(2, 3, 4, 8), ["SdpaNode"]),
    "summand of attention that masks nothing": (attention(torch.zeros(4, 4)), floats(2, 3, 4, 8), ["SdpaNode"]),
    "batch norm": (Norm(), floats(2, 3, 4, 4), ["MultiplyNode", "AddNode"]),
    "large weight": (ScaledWeight(), floats(2, 400), ["AddmmNode"]),
}
# Programs in which no instruction may be folded away.
NOT_FOLDED = {
    "narrowing cast": (lambda x: x.to(f16).to(f32), floats(3, dtype=f32), ["AsTypeNode"] * 2),
    "cast that loses precision": (lambda x: x.to(bf16).to(f32), floats(3, dtype=f16), ["AsTypeNode"] * 2),
    "large integers through float32": (lambda x: x.to(f32).to(i64), ints(3), ["AsTypeNode"] * 2),
    "permutes around another instruction": (
        lambda x: x.permute(1, 0, 2).exp().permute(1, 0, 2),
        floats(2, 3, 4),
        ["TransposeNode", "ExpNode", "TransposeNode"],
    ),
    "mask of attention that masks one key": (
        attention(torch.arange(4) < 3),
        floats(2, 3, 4, 8),
        ["SdpaNode", "AnyNode", "WhereNode"],
    ),
    "summand of zero, which changes -0.0": (lambda x: x + 0.0, floats(3), ["AddNode"]),
    "factor of one that changes the shape": (lambda x: x * torch.ones(2, 1), floats(3), ["FullNode", "MultiplyNode"]),
    "large weight with two users": (
        ScaledWeight(reads_weight=True),
        floats(2, 400),
        ["MultiplyNode", "AddmmNode", "TakeNode", "AddNode"],
    ),
    "large constant": (lambda x: x + torch.arange(40000) * 2, ints(40000), ["ARangeNode", "MultiplyNode", "AddNode"]),
}


def instructions(name: str, fn, inputs) -> list[str]:
    """Lower `fn`, compare its results with eager torch, and return the names of its instructions."""
    case = row(f"program/{name}", fn, inputs, dtypes=[f32])
    lowered = lower(case)
    run_in_process(case, lowered)
    return [i.op.NAME for g in lowered.graphs for c in g.instruction_chains for i in c.instructions]


@pytest.mark.parametrize("name", FOLDED)
def test_folded(delegate, name):
    fn, inputs, expected = FOLDED[name]
    assert instructions(name, fn, inputs) == expected


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_not_folded(delegate, name):
    fn, inputs, expected = NOT_FOLDED[name]
    assert instructions(name, fn, inputs) == expected


def test_view_of_a_buffer_keeps_the_old_value(delegate):
    case = row("program/old value", OldValue(), floats(2, 3), dtypes=[f32], calls=3)
    lowered = lower(case)
    run_in_process(case, lowered)
    assert any(expected[0].any() for _, expected in lowered.calls)


@pytest.mark.parametrize("wide, narrow", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_can_represent(wide, narrow):
    """`can_represent` is true if the extreme values of `narrow` survive a cast to `wide` and back."""
    if narrow.is_floating_point:
        limits = torch.finfo(narrow)
        values = torch.tensor([limits.max, limits.min, limits.tiny, 1 + limits.eps, -0.0], dtype=narrow)
    elif narrow == torch.bool:
        values = torch.tensor([True, False])
    else:
        limits = torch.iinfo(narrow)
        values = torch.tensor([limits.max, limits.max - 1, limits.min, limits.min + 1], dtype=narrow)
    cast = values.to(wide)
    same = (cast.to(narrow) == values) & (cast.double() == values.double())
    survives = bool(same.all()) and (wide.is_floating_point or not narrow.is_floating_point)
    assert can_represent(wide, narrow) == survives
