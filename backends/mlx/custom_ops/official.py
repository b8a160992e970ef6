"""The torch operators of ExecuTorch's own MLX delegate: schema, eager kernel, fake kernel.

The operators are `torch.ops.mlx.rope`, `custom_sdpa`, `kv_cache_update`, `gather_mm`, `gather_qmm`, `moe_gather_inputs`
and `moe_scatter_outputs`. A model that calls these operators can be exported unchanged, because their names, arguments
and meaning are the same as in executorch 1.5.1. `mlx::sample` is not defined here: this project's operator of that
name, in `custom_kernel_ops`, has other arguments.

Importing this module defines the operators in the library `mlx`. An operator that already exists with the same
arguments is kept.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import library
from .packing import dequantize, pack


def define(schema, eager, fake):
    """Like `library.define`, but returns an existing operator if it has the same arguments."""
    parsed = torch._C.parse_schema(f"mlx::{schema}")
    if parsed.name in torch._C._dispatch_get_all_op_names():
        existing = getattr(torch.ops.mlx, parsed.name.removeprefix("mlx::")).default
        if _arguments(existing._schema) == _arguments(parsed):
            return existing
    return library.define(schema, eager, fake)


def _arguments(schema):
    return [(a.name, str(a.real_type)) for a in schema.arguments]


# Attention over a cache ------------------------------------------------------------------


def _kv_cache_update(cache, new_values, start_pos, ring_size=0):
    length, capacity = new_values.shape[2], cache.shape[2]
    positions = torch.arange(start_pos, start_pos + length)
    if ring_size > 0:
        if not length <= ring_size <= capacity:
            raise ValueError(
                f"mlx::kv_cache_update: ring_size: got {ring_size} for {length} new positions in a cache of "
                f"{capacity}, expected a value in [{length}, {capacity}]"
            )
        positions %= ring_size
    elif start_pos < 0 or start_pos + length > capacity:
        raise ValueError(
            f"mlx::kv_cache_update: positions [{start_pos}, {start_pos + length}) are out of range [0, {capacity})"
        )
    cache[:, :, positions] = new_values.to(cache.dtype)
    return new_values.new_empty(1)


# Writes `new_values` [B, H, S, D] into `cache` [B, H, C, D] in place, from position `start_pos` on. With a nonzero
# `ring_size`, position p is written at index p % ring_size. The result [1] has no meaning.
kv_cache_update = define(
    "kv_cache_update(Tensor(a!) cache, Tensor new_values, SymInt start_pos, SymInt ring_size=0) -> Tensor",
    _kv_cache_update,
    lambda cache, new_values, start_pos, ring_size=0: new_values.new_empty(1),
)


def _custom_sdpa(query, key, value, start_pos, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    end = start_pos + query.shape[2]
    if start_pos < 0 or end > key.shape[2]:
        raise ValueError(f"mlx::custom_sdpa: query positions [{start_pos}, {end}) are out of range [0, {key.shape[2]})")
    if is_causal:
        attn_mask = torch.arange(end) <= torch.arange(start_pos, end)[:, None]
    return scaled_dot_product_attention(
        query, key[:, :, :end], value[:, :, :end], attn_mask, dropout_p, scale=scale, enable_gqa=True
    )


# Attention of `query` [B, H, S, D] at positions `start_pos` to `start_pos + S` over the first `start_pos + S` positions
# of the caches `key` and `value` [B, G, C, D]. G divides H. With `is_causal`, the query at position p attends to the
# positions 0 … p, and `attn_mask` is ignored. `scale` is D^-0.5 by default.
custom_sdpa = define(
    "custom_sdpa(Tensor query, Tensor key, Tensor value, SymInt start_pos, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, float? scale=None) -> Tensor",
    _custom_sdpa,
    lambda query, key, value, *_, **__: query.new_empty((*query.shape[:-1], value.shape[-1])),
)


def rotate(x, dims, pos, traditional=False, base=500000.0, scale=1.0, freqs=None):
    """The eager kernel of `mlx::rope`, whose arguments are explained below."""
    if freqs is not None and freqs.ndim > 1:
        angles = freqs.float().reshape(x.shape[2], dims // 2)
    else:
        if freqs is None:
            periods = base ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
        else:
            periods = freqs.float()
        positions = torch.arange(pos, pos + x.shape[2], dtype=torch.float32) * scale
        angles = positions[:, None] / periods
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    head, tail = x[..., :dims], x[..., dims:]
    if traditional:
        left, right = head[..., 0::2], head[..., 1::2]
    else:
        left, right = head.chunk(2, -1)
    halves = left * cos - right * sin, left * sin + right * cos
    rotated = torch.stack(halves, -1).flatten(-2) if traditional else torch.cat(halves, -1)
    return torch.cat((rotated, tail), -1)


# Rotary position embedding (Su et al., "RoFormer", 2021) of the first `dims` features of `x` [B, H, T, D]. The T
# vectors of a sequence are at the positions `pos` to `pos + T`. The angle of feature pair i at position p is
# p * scale / freqs[i]. Despite its name, `freqs` [dims / 2] holds periods, by default base^(2i / dims). If `freqs` is
# [T, dims / 2], it holds the angles themselves. With `traditional`, features 2i and 2i + 1 form a pair, otherwise
# features i and i + dims / 2.
rope = define(
    "rope(Tensor x, SymInt dims, SymInt pos, bool traditional=False, float base=500000.0, "
    "float scale=1.0, Tensor? freqs=None) -> Tensor",
    rotate,
    lambda x, *_, **__: x.new_empty(x.shape),
)


# Mixtures of experts -----------------------------------------------------------------------


def _select(matrices, index):
    return matrices if index is None else matrices.flatten(0, -3)[index.long()]


def _product_fake(a, batch_shape_of_b, columns, rhs_indices, lhs_indices):
    left = a.shape[:-2] if lhs_indices is None else lhs_indices.shape
    right = batch_shape_of_b if rhs_indices is None else rhs_indices.shape
    return a.new_empty((*torch.broadcast_shapes(left, right), a.shape[-2], columns))


def _gather_mm(a, b, rhs_indices=None, lhs_indices=None, sorted_indices=None):
    return _select(a, lhs_indices) @ _select(b, rhs_indices)


def _gather_mm_fake(a, b, rhs_indices=None, lhs_indices=None, sorted_indices=None):
    return _product_fake(a, b.shape[:-2], b.shape[-1], rhs_indices, lhs_indices)


# Products of matrices of `a` [..., M, K] and matrices of `b` [..., K, N]. `lhs_indices` selects matrices of `a`, and
# `rhs_indices` selects matrices of `b`. An index refers to the flattened batch dimensions of its operand. The two index
# tensors broadcast against each other. An operand without indices keeps its batch dimensions. A nonzero
# `sorted_indices` (0-d) promises that `rhs_indices` ascend. The promise affects only the speed.
gather_mm = define(
    "gather_mm(Tensor a, Tensor b, Tensor? rhs_indices=None, Tensor? lhs_indices=None, "
    "Tensor? sorted_indices=None) -> Tensor",
    _gather_mm,
    _gather_mm_fake,
)


def pack_experts(w, bits):
    """Return the weights of experts in MLX's packing, uint32 [E, N, K * bits / 32].

    `w` is int8 [E, N, K] in [-2^(bits-1), 2^(bits-1)), or uint8 [E, N, K / 2] with two 4-bit integers from [0, 16)
    per byte. MLX's integers are unsigned: int8 values are shifted by 2^(bits-1), uint8 values are used as they are.
    """
    if w.dtype == torch.uint8:
        return w.contiguous().view(torch.uint32)
    return pack((w.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8), bits)


def expert_biases(scales, biases, bits):
    """Return the biases that belong to the unsigned integers of `pack_experts`, float32 [E, N, K / group_size].

    The argument `biases` holds biases if its dtype is a float, and zero points if its dtype is an integer. None stands
    for biases of 0.
    """
    half = 2 ** (bits - 1) * scales.float()
    if biases is None:
        return -half
    if biases.dtype.is_floating_point:
        return biases.float() - half
    return -biases.float() * scales.float() - half


def _check_experts(w, bits, mode, transpose):
    if mode != "affine" or not transpose or w.dtype not in (torch.int8, torch.uint8):
        raise ValueError(
            f"mlx::gather_qmm: got mode {mode!r}, transpose {transpose} and {w.dtype} weights, expected mode 'affine', "
            "transpose True and int8 or uint8 weights"
        )
    if w.dtype == torch.uint8 and bits != 4:
        raise ValueError(f"mlx::gather_qmm: bits: got {bits}, expected 4 for uint8 weights")


def _gather_qmm(
    x,
    w,
    scales,
    biases=None,
    rhs_indices=None,
    lhs_indices=None,
    transpose=True,
    group_size=32,
    bits=4,
    mode="affine",
    sorted_indices=None,
):
    _check_experts(w, bits, mode, transpose)
    offsets = expert_biases(scales, biases, bits)
    matrices = dequantize(pack_experts(w, bits), scales, offsets, group_size, bits).to(x.dtype)
    return _select(x, lhs_indices) @ _select(matrices.mT, rhs_indices)


def _gather_qmm_fake(
    x,
    w,
    scales,
    biases=None,
    rhs_indices=None,
    lhs_indices=None,
    transpose=True,
    group_size=32,
    bits=4,
    mode="affine",
    sorted_indices=None,
):
    _check_experts(w, bits, mode, transpose)
    return _product_fake(x, w.shape[:-2], w.shape[-2], rhs_indices, lhs_indices)


# Like `gather_mm`, with quantized and transposed matrices in place of `b`. `w` is as in `pack_experts`; `scales` and
# `biases` are [E, N, K / group_size]. Let q be the signed integers that `w` holds: an int8 value itself, or a 4-bit
# value of a uint8 `w` minus 8. The weights are q * scales + biases, or (q - biases) * scales if `biases` are integers.
gather_qmm = define(
    "gather_qmm(Tensor x, Tensor w, Tensor scales, Tensor? biases=None, Tensor? rhs_indices=None, "
    "Tensor? lhs_indices=None, bool transpose=True, SymInt group_size=32, SymInt bits=4, "
    "str mode='affine', Tensor? sorted_indices=None) -> Tensor",
    _gather_qmm,
    _gather_qmm_fake,
)


def gathered_inputs(x, expert_indices, top_k, sort_cutoff):
    """The torch function of `mlx::moe_gather_inputs`, whose arguments and results are explained below."""
    is_sorted = (torch.full((), x.shape[0], dtype=torch.int32) > sort_cutoff).int()
    experts = expert_indices.flatten()
    # If not is_sorted, all keys are 0, and the stable sort keeps the order.
    order = torch.argsort(experts * is_sorted, stable=True)
    tokens = x[order // top_k].unsqueeze(-2)
    return tokens, experts[order].int(), is_sorted, torch.argsort(order, stable=True).int()


def _gathered_inputs_fake(x, expert_indices, top_k, sort_cutoff):
    count = x.shape[0] * top_k
    integers = x.new_empty(count, dtype=torch.int32)
    return x.new_empty((count, 1, x.shape[-1])), integers, integers[0].clone(), integers.clone()


# Pairs every token of `x` [N, D] with each of its experts in `expert_indices` [N, top_k], and sorts the pairs by expert
# if N > sort_cutoff. Returns the tokens [N * top_k, 1, D], the experts (int32), whether the pairs are sorted (int32,
# 0-d), and the place of each original pair in the results (int32).
moe_gather_inputs = define(
    "moe_gather_inputs(Tensor x, Tensor expert_indices, SymInt top_k, SymInt sort_cutoff) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    gathered_inputs,
    _gathered_inputs_fake,
)


def scattered_outputs(down, sort_experts, inv_order, top_k):
    """The torch function of `mlx::moe_scatter_outputs`, whose arguments are explained below."""
    identity = torch.arange(down.shape[0], dtype=inv_order.dtype)
    outputs = down.squeeze(-2)[torch.where(sort_experts != 0, inv_order, identity).long()]
    return outputs.unflatten(0, (-1, top_k))


# Restores the order of the tokens: `down` [N * top_k, 1, H] → [N, top_k, H]. `sort_experts`, which says whether the
# pairs are sorted, and `inv_order` are the third and the fourth result of `moe_gather_inputs`.
moe_scatter_outputs = define(
    "moe_scatter_outputs(Tensor down, Tensor sort_experts, Tensor inv_order, SymInt top_k) -> Tensor",
    scattered_outputs,
    lambda down, sort_experts, inv_order, top_k: down.new_empty((down.shape[0] // top_k, top_k, down.shape[-1])),
)
