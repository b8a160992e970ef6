"""Fusions: the payload contains the fused IR node, and the result equals the result of eager torch."""

import math

import pytest
import torch
from oprows import Dyn, bf16, data, f16, f32, floats, ints, lower, row, run_in_process

FLOATS = (f32, f16, bf16)
N = Dyn("n", 3, also=(1, 7))


class RMSNorm(torch.nn.Module):
    """As in Hugging Face's Llama: normalization in float32, the weight in the dtype of the input."""

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
    """As in Hugging Face's Llama: queries and keys share cos and sin.

    In half precision, eager torch rounds cos, sin and each product. The program rounds only the results.
    """

    def __init__(self, dim=8):
        super().__init__()
        frequencies = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def _apply(self, fn, recurse=True):
        return self  # keep the frequencies in float32 when the model is cast

    sequence_axis = 2

    def forward(self, query, key, start):
        position_ids = (torch.arange(query.shape[self.sequence_axis]) + start)[None]
        freqs = position_ids[..., None].float() * self.inv_freq.to(dtype=torch.float)
        angles = torch.cat((freqs, freqs), dim=-1)
        cos = (angles.cos() * 1.0).to(query.dtype).unsqueeze(3 - self.sequence_axis)
        sin = (angles.sin() * 1.0).to(query.dtype).unsqueeze(3 - self.sequence_axis)
        return (query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin)


def repeat_kv(x, times):
    batch, heads, length, dim = x.shape
    x = x[:, :, None].expand(batch, heads, times, length, dim)
    return x.reshape(batch, heads * times, length, dim)


def grouped_attention(query, key, value):
    times = query.shape[1] // key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, times), repeat_kv(value, times), is_causal=True
    )


def ir_nodes(lowered):
    return [i.op.NAME for g in lowered.graphs for c in g.instruction_chains for i in c.instructions]


def check(case):
    """Lower an op row, run it, and compare with eager torch. Returns the names of the IR nodes."""
    lowered = lower(case)
    run_in_process(case, lowered)
    return ir_nodes(lowered)


SQUARES = {"pow": lambda x: x.pow(2), "mul": lambda x: x * x}


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("weight_first", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rms_norm(delegate, square, weight_first, dtype):
    module = RMSNorm(SQUARES[square], weight_first)
    case = row("program/rms", module, floats(2, N, 8), dtypes=[dtype], loose=2)
    assert check(case) == ["RMSNormNode"]


def test_norm_whose_scale_has_another_user_is_not_fused(delegate):
    def norm(x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x * scale, scale

    case = row("program/read inside", norm, floats(2, 8), dtypes=[f32])
    assert "RMSNormNode" not in check(case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rope(delegate, dtype):
    case = row(
        "program/rope",
        Rotary(),
        floats(1, 4, N, 8),
        floats(1, 2, N, 8),
        ints(1, low=0, high=9),
        dtypes=[dtype],
        loose=2,
        loose_half=4,
    )
    assert check(case).count("RopeNode") == 2


class RotaryBeforeTranspose(Rotary):
    """As in Gemma 3n: x is [B, S, H, D], and heads and sequence are swapped after the rotation."""

    sequence_axis = 1

    def forward(self, query, key, start):
        return tuple(x.transpose(1, 2) for x in super().forward(query, key, start))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("length", [N, 4, 1], ids=["dynamic", "as many as heads", "one"])
def test_rope_along_axis_1(delegate, dtype, length):
    case = row(
        "program/rope on axis 1",
        RotaryBeforeTranspose(),
        floats(1, length, 4, 8),
        floats(1, length, 2, 8),
        ints(1, low=0, high=9),
        dtypes=[dtype],
        loose=2,
        loose_half=4,
    )
    assert check(case).count("RopeNode") == 2


class RotaryAnywhere(Rotary):
    """Takes the positions as an input, in place of `arange(S) + start`, so that they can be any integers."""

    def forward(self, query, key, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(dtype=torch.float)
        angles = torch.cat((freqs, freqs), dim=-1)
        cos, sin = (f(angles).to(query.dtype).unsqueeze(3 - self.sequence_axis) for f in (torch.cos, torch.sin))
        return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


class RotaryAnywhereBeforeTranspose(RotaryAnywhere):
    sequence_axis = 1


@pytest.mark.parametrize("length", [N, 4, 1], ids=["dynamic", "as many as heads", "one"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rope_at_any_positions(delegate, length, dtype):
    positions = ints(1, length, low=0, high=90)
    case = row(
        "program/rope anywhere",
        RotaryAnywhere(),
        floats(1, 4, length, 8),
        floats(1, 2, length, 8),
        positions,
        dtypes=[dtype],
        loose=2,
        loose_half=4,
    )
    assert check(case).count("RopeNode") == 2
    case = row(
        "program/rope anywhere on axis 1",
        RotaryAnywhereBeforeTranspose(),
        floats(1, length, 4, 8),
        floats(1, length, 2, 8),
        positions,
        dtypes=[dtype],
        loose=2,
        loose_half=4,
    )
    assert check(case).count("RopeNode") == 2


class RoundedRotary(Rotary):
    """Rounds the positions, the frequencies or the cosines to bfloat16."""

    def __init__(self, rounded):
        super().__init__()
        self.rounded = rounded

    def forward(self, query, positions):
        positions, frequencies = positions.float(), self.inv_freq
        if self.rounded == "positions":
            positions = positions.bfloat16().float()
        if self.rounded == "frequencies":
            frequencies = frequencies.bfloat16().float()
        freqs = positions[:, None] * frequencies
        cos, sin = (f(torch.cat((freqs, freqs), dim=-1)) for f in (torch.cos, torch.sin))
        if self.rounded == "cosines":
            cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
        return query * cos + rotate_half(query) * sin


@pytest.mark.parametrize("rounded", ["positions", "frequencies", "cosines"])
def test_rope_with_rounded_angles_is_not_fused(delegate, rounded):
    case = row(
        "program/rounded",
        RoundedRotary(rounded),
        floats(1, 2, 5, 8),
        ints(5, low=250, high=300),
        dtypes=[f32],
        loose=20,
    )
    assert "RopeNode" not in check(case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rope_of_one_token_of_each_sequence(delegate, dtype):
    positions = ints(3, 1, low=0, high=90)
    case = row(
        "program/rope, one token each",
        RotaryAnywhere(),
        floats(3, 4, 1, 8),
        floats(3, 1, 1, 8),
        positions,
        dtypes=[dtype],
        loose=2,
        loose_half=4,
    )
    assert check(case).count("RopeNode") == 2
    case = row(
        "program/rope, one token each, on axis 1",
        RotaryAnywhereBeforeTranspose(),
        floats(3, 1, 4, 8),
        floats(3, 1, 1, 8),
        positions,
        dtypes=[dtype],
        loose=2,
        loose_half=4,
    )
    assert check(case).count("RopeNode") == 2


def test_rope_at_any_positions_of_several_sequences_is_not_fused(delegate):
    """RopeNode takes one offset per sequence.

    For any positions, the fusion therefore makes each position a sequence of its own, so x must hold one sequence.
    """
    case = row(
        "program/rope, two sequences",
        RotaryAnywhere(),
        floats(2, 4, 3, 8),
        floats(2, 2, 3, 8),
        ints(1, 3, low=0, high=9),
        dtypes=[f32],
        loose=2,
    )
    assert "RopeNode" not in check(case)


class RotaryAlongHeads(Rotary):
    """A faulty model, which torch accepts: with as many heads as positions, the angles broadcast along the heads."""

    def forward(self, query, key, start):
        return super().forward(query.transpose(1, 2), key.transpose(1, 2), start)


def test_rope_table_aligned_with_another_axis_agrees_with_torch(delegate):
    case = row(
        "program/rope along heads",
        RotaryAlongHeads(),
        floats(1, 4, 4, 8),
        floats(1, 4, 4, 8),
        ints(1, low=0, high=9),
        dtypes=[f32],
        loose=2,
    )
    check(case)


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4), (4,)], ids=str)
def test_rms_of_rows_without_keepdim_is_not_fused(delegate, shape):
    def norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1) + 1e-5)

    case = row("program/rms without keepdim", norm, floats(*shape), dtypes=[f32])
    assert "RMSNormNode" not in check(case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_grouped_attention(delegate, dtype):
    case = row(
        "program/attention",
        grouped_attention,
        floats(1, 4, 5, 8),
        floats(1, 2, 5, 8),
        floats(1, 2, 5, 8),
        dtypes=[dtype],
        loose=4,
    )
    ops = check(case)
    assert ops == ["SdpaNode"], ops


def test_grouped_attention_dynamic(delegate):
    case = row(
        "program/attention dynamic",
        grouped_attention,
        floats(1, 4, N, 8),
        floats(1, 2, N, 8),
        floats(1, 2, N, 8),
        dtypes=[f32],
        loose=4,
    )
    ops = check(case)
    assert "SdpaNode" in ops and "BroadcastToNode" not in ops, ops


def test_other_uses_of_repeated_keys_agree_with_torch(delegate):
    def attention(query, x):
        keys = repeat_kv(x, 2)
        return [torch.nn.functional.scaled_dot_product_attention(q, keys, keys) for q in (keys, query)]

    case = row(
        "program/attention to itself, and of one head",
        attention,
        floats(1, 1, 5, 8),
        floats(1, 2, 5, 8),
        dtypes=[f32],
        loose=4,
    )
    assert check(case).count("SdpaNode") == 2


def test_keys_repeated_along_the_batch_agree_with_torch(delegate):
    """The axis of the batch, of extent 1, is expanded, and the view makes it a part of the axis of the heads."""

    def attention(query, x):
        keys = x[:, :, None].expand(3, 2, 1, 5, 8).reshape(1, 6, 5, 8)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, keys)

    case = row("program/repeated batch", attention, floats(1, 6, 5, 8), floats(1, 2, 5, 8), dtypes=[f32], loose=4)
    check(case)


class GemmaNorm(torch.nn.Module):
    """As in Gemma: everything is computed in float32, and the factor is one plus the weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-0.5, 0.5, 8))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.float())).type_as(x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rms_norm_with_one_plus_weight(delegate, dtype):
    case = row("program/gemma", GemmaNorm(), floats(2, N, 8), dtypes=[dtype], loose=2)
    casts = [] if dtype == f32 else ["AsTypeNode"]
    assert check(case) == [*casts, "RMSNormNode", *casts]


class LayerNorm(torch.nn.Module):
    def __init__(self, normalize, affine=True):
        super().__init__()
        self.normalize, self.affine = normalize, affine
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x):
        y = self.normalize(x)
        return self.weight * y + self.bias if self.affine else y


def by_squares(x):
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + 1e-5)


def by_powers(x):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def by_variance(x, correction=0):
    y = x.float()
    y = (y - y.mean(-1, keepdim=True)) / torch.sqrt(y.var(-1, keepdim=True, correction=correction) + 1e-5)
    return y.to(x.dtype)


LAYER_NORMS = {
    "squares": (LayerNorm(by_squares), f32),
    "powers": (LayerNorm(by_powers), f32),
    "plain": (LayerNorm(by_powers, affine=False), f32),
    "variance in float32 of bfloat16": (LayerNorm(by_variance), bf16),
}


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_layer_norm(delegate, name):
    module, dtype = LAYER_NORMS[name]
    case = row("program/layer norm", module, floats(2, N, 8), dtypes=[dtype], loose=4)
    assert check(case) == ["LayerNormNode"]


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def gelu_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@pytest.mark.parametrize("gelu", [gelu_new, gelu_fast, gelu_erf])
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_gelu(delegate, gelu, dtype):
    # The arguments are a sum and a product. The pattern must not take the product for a part of the GELU.
    case = row(
        "program/gelu", lambda x, y: (gelu(x + y), gelu(x * y)), floats(3, N), floats(3, N), dtypes=[dtype], loose=4
    )
    # A portable program computes GELU in float32: the casts are around the node.
    names = sorted(name for name in check(case) if name != "AsTypeNode")
    assert names == ["AddNode", "GeluNode", "GeluNode", "MultiplyNode"]


class Flattened(torch.nn.Module):
    """As in GPT-2: the sequences are flattened to one matrix, which is multiplied with the weights."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 40).reshape(8, 5))
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x):
        y = torch.addmm(self.bias, x.view(-1, 8), self.weight)
        z = torch.mm(x.view(-1, 8), self.weight)
        return y.view(*x.shape[:-1], 5), z.view(*x.shape[:-1], 5)


def test_product_of_a_flattened_tensor(delegate):
    assert check(row("program/flattened", Flattened(), floats(2, 3, 8), dtypes=[f32])) == ["AddmmNode"] * 2


class Positions(torch.nn.Module):
    """Updates the position buffer between the computation of the angles and the rotation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("position", torch.tensor([2]))
        self.register_buffer("inv_freq", 10.0 ** -torch.arange(4.0))

    def forward(self, x):
        angles = (torch.arange(x.shape[2]) + self.position)[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        self.position[0] += x.shape[2]
        return x * cos + rotate_half(x) * sin


class OldState(torch.nn.Module):
    """Multiplies the old value of a buffer after a write to the buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.linspace(-1, 1, 24).reshape(2, 3, 4))
        self.register_buffer("weight", torch.linspace(-1, 1, 20).reshape(4, 5))

    def forward(self, x):
        flat = self.state.clone().reshape(6, 4)
        self.state.index_copy_(1, torch.tensor([1]), x)
        return torch.mm(flat, self.weight).reshape(2, 3, 5)


STATEFUL = [(Positions, (1, 2, 3, 8), "RopeNode"), (OldState, (2, 1, 4), "AddmmNode")]


@pytest.mark.parametrize("module, shape, op", STATEFUL)
def test_a_fusion_reads_the_old_value_of_a_buffer(delegate, module, shape, op):
    case = row(f"program/{module.__name__}", module(), floats(*shape), dtypes=(f32,), calls=3)
    assert op in check(case)


class PartialRotary(Rotary):
    """As in Phi-3: rotates the first half of the last axis and appends the second half of `other`.

    In Phi-3, `other` is the query itself.
    """

    def forward(self, query, other, start):
        rotated = super().forward(query[..., :8], query[..., :8], start)[0]
        return torch.cat([rotated, other[..., 8:]], dim=-1)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_partial_rope(delegate, dtype):
    fused = PartialRotary()
    case = row(
        "program/partial",
        lambda x, start: fused(x, x, start),
        floats(1, 4, N, 16),
        ints(1, low=0, high=9),
        dtypes=[dtype],
        loose=4,
        loose_half=8,
    )
    ops = check(case)
    assert ops.count("RopeNode") == 1 and "ConcatenateNode" not in ops and "SliceNode" not in ops, ops


def test_partial_rope_with_the_rest_of_another_tensor_is_not_fused(delegate):
    case = row(
        "program/two tensors",
        PartialRotary(),
        floats(1, 4, 3, 16),
        floats(1, 4, 3, 16),
        ints(1, low=0, high=9),
        dtypes=[f32],
        loose=4,
    )
    assert "ConcatenateNode" in check(case)


def norm_over(axis):
    return lambda x: x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + 1e-5)


class CastNumber(torch.nn.Module):
    """Casts a constant, then computes with it."""

    def __init__(self, number, function):
        super().__init__()
        self.register_buffer("number", torch.tensor(number))
        self.function = function

    def forward(self, x):
        return self.function(x, self.number)


# Functions that resemble a fusion but are not: name → (function, inputs, the IR node that must not appear).
NEAR_MISSES = {
    "norm over another axis": (norm_over(1), [floats(2, 8, 8)], "RMSNormNode"),
    "norm of a number": (norm_over(-1), [floats()], "RMSNormNode"),
    "factor that is truncated to 0": (
        CastNumber(0.5, lambda x, half: x * half.int() * (1 + torch.erf(x / math.sqrt(2.0)))),
        [floats(9)],
        "GeluNode",
    ),
    "sample variance": (lambda x: by_variance(x, correction=1), [floats(2, 8)], "LayerNormNode"),
    "variance not centered": (
        lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
        [floats(2, 8)],
        "LayerNormNode",
    ),
    "another cubic coefficient": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.05 * x**3))),
        [floats(9)],
        "GeluNode",
    ),
    "erf without sqrt(2)": (lambda x: 0.5 * x * (1 + torch.erf(x)), [floats(9)], "GeluNode"),
    "not halved": (lambda x: x * (1 + torch.erf(x / math.sqrt(2.0))), [floats(9)], "GeluNode"),
    "gate of another tensor": (
        lambda x, y: 0.5 * y * (1 + torch.erf(x / math.sqrt(2.0))),
        [floats(9), floats(9)],
        "GeluNode",
    ),
}


def test_rounded_epsilon(delegate):
    """1e-8 is 0 in float16."""
    norm = CastNumber(1e-8, lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps.half()))
    case = row("program/rounded epsilon", norm, data([[3e-5, -2e-5, 1e-5]]), dtypes=[f32])
    assert check(case) == ["RMSNormNode"]


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_not_fused(delegate, name):
    function, inputs, node = NEAR_MISSES[name]
    ops = check(row(f"program/{name}", function, *inputs, dtypes=[f32], loose=4))
    assert node not in ops


def test_views_that_regroup_the_rows_of_a_product_are_kept(delegate):
    case = row(
        "program/mixed",
        lambda x, w: torch.mm(x.view(6, 4), w).view(2, 3, 4).transpose(0, 1),
        floats(3, 2, 4),
        floats(4, 4),
        dtypes=[f32],
    )
    assert "ReshapeNode" in check(case)


def scattered(x, index, fill=0.0):
    return x.new_full((3, 8), fill).scatter_add(1, index, x[:, :2] + 1)


SUMS = {
    "first": lambda x, index: scattered(x, index) + x.exp(),
    "second": lambda x, index: x.exp() + scattered(x, index),
    "ones": lambda x, index: scattered(x, index, 1.0) + x.exp(),
    "twice": lambda x, index: (lambda y: (y + x.exp()) * y)(scattered(x, index)),
    "alpha": lambda x, index: torch.add(scattered(x, index), x.exp(), alpha=2),
    "broadcast": lambda x, index: scattered(x, index) + x[:1].exp(),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_scatter_into_zeros_that_is_added(delegate, name):
    ops = check(row("program/scatter", SUMS[name], floats(3, 8), ints(3, 2, low=0, high=7), dtypes=[f32]))
    is_fused = name in ("first", "second")
    assert "ScatterAddNode" in ops and ("FullNode" not in ops) == is_fused, ops
