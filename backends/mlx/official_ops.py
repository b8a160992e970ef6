"""The torch operators of ExecuTorch's own MLX delegate: schema, eager kernel, fake kernel.

A model whose text calls them (`torch.ops.mlx.rope`, `custom_sdpa`, `kv_cache_update`, `gather_mm`,
`gather_qmm`, `moe_gather_inputs`, `moe_scatter_outputs`) exports here as it is. Names, arguments and
meaning are those of executorch 1.5.1; `mlx::sample` is ours, with other arguments. Importing this
module defines them in the operator library `mlx`; one that is there already, with these arguments,
is taken as it is.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import custom_ops
from .packing import pack, unpack


def define(schema, eager, fake):
    """As `custom_ops.define`, unless somebody has defined just this."""
    wanted = torch._C.parse_schema(f"mlx::{schema}")
    if wanted.name in torch._C._dispatch_get_all_op_names():
        there = getattr(torch.ops.mlx, wanted.name.removeprefix("mlx::")).default
        if _arguments(there._schema) == _arguments(wanted):
            return there
    return custom_ops.define(schema, eager, fake)


def _arguments(schema):
    return [(a.name, str(a.real_type)) for a in schema.arguments]


# Attention over a cache ------------------------------------------------------------------


def _kv_cache_update(cache, new_values, start_pos, ring_size=0):
    length = new_values.shape[2]
    rows = torch.arange(start_pos, start_pos + length)
    if ring_size > 0:
        if length > ring_size or ring_size > cache.shape[2]:
            raise ValueError(
                f"mlx::kv_cache_update: {length} rows into a ring of {ring_size} in a cache of "
                f"{cache.shape[2]}, expected as many or more each time"
            )
        rows %= ring_size
    elif start_pos < 0 or start_pos + length > cache.shape[2]:
        raise ValueError(
            f"mlx::kv_cache_update: rows {start_pos} to {start_pos + length} are outside a cache of "
            f"{cache.shape[2]}"
        )
    cache[:, :, rows] = new_values.to(cache.dtype)
    return new_values.new_empty(1)


# Writes `new_values` [B, H, S, D] into `cache` [B, H, C, D] from row `start_pos` on, in place; with a
# `ring_size`, into the rows modulo it. The result [1] means nothing.
kv_cache_update = define(
    "kv_cache_update(Tensor(a!) cache, Tensor new_values, SymInt start_pos, SymInt ring_size=0) -> Tensor",
    _kv_cache_update,
    lambda cache, new_values, start_pos, ring_size=0: new_values.new_empty(1),
)


def _custom_sdpa(
    query, key, value, start_pos, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None
):
    end = start_pos + query.shape[2]
    if start_pos < 0 or end > key.shape[2]:
        raise ValueError(
            f"mlx::custom_sdpa: queries at {start_pos} to {end} are outside a cache of {key.shape[2]}"
        )
    if is_causal:
        attn_mask = torch.arange(end) <= torch.arange(start_pos, end)[:, None]
    return scaled_dot_product_attention(
        query, key[:, :, :end], value[:, :, :end], attn_mask, dropout_p, scale=scale, enable_gqa=True
    )


# Attention of `query` [B, H, S, D], which stands at position `start_pos`, over the rows of the
# caches `key` and `value` [B, G, C, D] up to its own end; G divides H. `is_causal` sees to it that no
# query looks ahead, `attn_mask` is for the case without; `scale` is by default D^-0.5.
custom_sdpa = define(
    "custom_sdpa(Tensor query, Tensor key, Tensor value, SymInt start_pos, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, float? scale=None) -> Tensor",
    _custom_sdpa,
    lambda query, key, value, *_, **__: query.new_empty((*query.shape[:-1], value.shape[-1])),
)


def rotate(x, dims, pos, traditional=False, base=500000.0, scale=1.0, freqs=None):
    """`mlx::rope` in torch."""
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
    turning, rest = x[..., :dims], x[..., dims:]
    if traditional:
        left, right = turning[..., 0::2], turning[..., 1::2]
    else:
        left, right = turning.chunk(2, -1)
    halves = left * cos - right * sin, left * sin + right * cos
    turned = torch.stack(halves, -1).flatten(-2) if traditional else torch.cat(halves, -1)
    return torch.cat((turned, rest), -1)


# Rotary position embedding (Su et al., "RoFormer", 2021) of the first `dims` numbers of each row of
# `x` [B, H, T, D], whose first row stands at `pos`. Row t turns by (pos + t) * scale / period, the
# periods being `freqs` [dims / 2], by default base^(2i / dims). `freqs` [T, dims / 2] are the angles
# themselves. `traditional` pairs neighbours, else number i goes with i + dims / 2.
rope = define(
    "rope(Tensor x, SymInt dims, SymInt pos, bool traditional=False, float base=500000.0, "
    "float scale=1.0, Tensor? freqs=None) -> Tensor",
    rotate,
    lambda x, *_, **__: x.new_empty(x.shape),
)


# Mixtures of experts -----------------------------------------------------------------------


def _chosen(matrices, index):
    return matrices if index is None else matrices.flatten(0, -3)[index.long()]


def _product_fake(a, batch_of_b, columns, rhs_indices, lhs_indices):
    left = a.shape[:-2] if lhs_indices is None else lhs_indices.shape
    right = batch_of_b if rhs_indices is None else rhs_indices.shape
    return a.new_empty((*torch.broadcast_shapes(left, right), a.shape[-2], columns))


def _gather_mm(a, b, rhs_indices=None, lhs_indices=None, sorted_indices=None):
    return _chosen(a, lhs_indices) @ _chosen(b, rhs_indices)


def _gather_mm_fake(a, b, rhs_indices=None, lhs_indices=None, sorted_indices=None):
    return _product_fake(a, b.shape[:-2], b.shape[-1], rhs_indices, lhs_indices)


# Matrices of `a` [..., M, K] times matrices of `b` [..., K, N], each chosen out of its flattened batch
# by integers, whose shapes broadcast; without them each in its place. `sorted_indices`, 0-d, not 0:
# `rhs_indices` ascend, which changes the time only.
gather_mm = define(
    "gather_mm(Tensor a, Tensor b, Tensor? rhs_indices=None, Tensor? lhs_indices=None, "
    "Tensor? sorted_indices=None) -> Tensor",
    _gather_mm,
    _gather_mm_fake,
)


def words_of_experts(w, bits):
    """int8 [E, N, K] in [-2^(bits-1), 2^(bits-1)), or 4-bit pairs, uint8 [E, N, K / 2] counted from
    0 → MLX's words, uint32 [E, N, K * bits / 32], counted from 0."""
    if w.dtype == torch.uint8:
        return w.contiguous().view(torch.uint32)
    return pack((w.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8), bits)


def biases_of_experts(scales, biases, bits):
    """MLX's biases in float32. Integers are zero points."""
    half = 2 ** (bits - 1) * scales.float()
    if biases is None:
        return -half
    if biases.dtype.is_floating_point:
        return biases.float() - half
    return -biases.float() * scales.float() - half


def _check_experts(w, bits, mode, transpose):
    if mode != "affine" or not transpose or w.dtype not in (torch.int8, torch.uint8):
        raise ValueError(
            f"mlx::gather_qmm: mode {mode!r}, transpose {transpose}, {w.dtype}; expected affine, "
            "transposed weights in int8 or uint8"
        )
    if w.dtype == torch.uint8 and bits != 4:
        raise ValueError(f"mlx::gather_qmm: {bits} bits in uint8, expected 4, two in a byte")


def _gather_qmm(
    x, w, scales, biases=None, rhs_indices=None, lhs_indices=None, transpose=True, group_size=32,
    bits=4, mode="affine", sorted_indices=None,
):
    _check_experts(w, bits, mode, transpose)
    q = unpack(words_of_experts(w, bits), bits).unflatten(-1, (-1, group_size)).float()
    offsets = biases_of_experts(scales, biases, bits)
    matrices = (q * scales.float().unsqueeze(-1) + offsets.unsqueeze(-1)).flatten(-2).to(x.dtype)
    return _chosen(x, lhs_indices) @ _chosen(matrices.mT, rhs_indices)


def _gather_qmm_fake(
    x, w, scales, biases=None, rhs_indices=None, lhs_indices=None, transpose=True, group_size=32,
    bits=4, mode="affine", sorted_indices=None,
):
    _check_experts(w, bits, mode, transpose)
    return _product_fake(x, w.shape[:-2], w.shape[-2], rhs_indices, lhs_indices)


# The same with quantized matrices, transposed: `w` as in `words_of_experts`; `scales`, `biases`
# [E, N, K / group_size]. w stands for w * scales + biases, and where biases are integers, for
# (w - biases) * scales.
gather_qmm = define(
    "gather_qmm(Tensor x, Tensor w, Tensor scales, Tensor? biases=None, Tensor? rhs_indices=None, "
    "Tensor? lhs_indices=None, bool transpose=True, SymInt group_size=32, SymInt bits=4, "
    "str mode='affine', Tensor? sorted_indices=None) -> Tensor",
    _gather_qmm,
    _gather_qmm_fake,
)


def gathered_inputs(x, expert_indices, top_k, sort_cutoff):
    """`mlx::moe_gather_inputs` in torch."""
    sorts = (torch.full((), x.shape[0], dtype=torch.int32) > sort_cutoff).int()
    experts = expert_indices.flatten()
    # Nothing but zeros has its order already.
    order = torch.argsort(experts * sorts, stable=True)
    rows = x[order // top_k].unsqueeze(-2)
    return rows, experts[order].int(), sorts, torch.argsort(order, stable=True).int()


def _gathered_inputs_fake(x, expert_indices, top_k, sort_cutoff):
    count = x.shape[0] * top_k
    integers = x.new_empty(count, dtype=torch.int32)
    return x.new_empty((count, 1, x.shape[-1])), integers, integers[0].clone(), integers.clone()


# `x` [N, D], `expert_indices` [N, top_k] → for each pair of a token and its expert, in the order of
# the experts if N > sort_cutoff: the token [N * top_k, 1, D], the expert (int32), whether they are in
# order (int32, 0-d), and where each pair went (int32).
moe_gather_inputs = define(
    "moe_gather_inputs(Tensor x, Tensor expert_indices, SymInt top_k, SymInt sort_cutoff) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    gathered_inputs,
    _gathered_inputs_fake,
)


def scattered_outputs(down, sort_experts, inv_order, top_k):
    """`mlx::moe_scatter_outputs` in torch."""
    own = torch.arange(down.shape[0], dtype=inv_order.dtype)
    rows = down.squeeze(-2)[torch.where(sort_experts != 0, inv_order, own).long()]
    return rows.unflatten(0, (-1, top_k))


# `down` [N * top_k, 1, H] back in the order of the tokens, [N, top_k, H]; the two others are results of
# `moe_gather_inputs`.
moe_scatter_outputs = define(
    "moe_scatter_outputs(Tensor down, Tensor sort_experts, Tensor inv_order, SymInt top_k) -> Tensor",
    scattered_outputs,
    lambda down, sort_experts, inv_order, top_k: down.new_empty(
        (down.shape[0] // top_k, top_k, down.shape[-1])
    ),
)
