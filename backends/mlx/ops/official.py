"""Lowers the torch operators that ExecuTorch's own MLX delegate defines, and `kvcache::update_and_attend`.

"Official" in names stands for that delegate. Models written for it call these operators: `mlx::rope`,
`mlx::custom_sdpa`, `mlx::kv_cache_update`, `mlx::gather_mm`, `mlx::gather_qmm`, and the two operators of
mixture-of-experts layers, `mlx::moe_gather_inputs` and `mlx::moe_scatter_outputs`. `custom_ops/official.py` defines
them.
"""

from __future__ import annotations

import torch
from executorch.extension.llm.cache import update_and_attend as _  # noqa: F401  (defines kvcache)

from ..builder import dtypes
from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import Space
from ..custom_ops import official
from ..serialization import ir
from .lib.cache_write import add, write_cache
from .lib.quantized_weights import affine_product_dtype


@REGISTRY.lower(torch.ops.higher_order.auto_functionalized_v2)
def auto_functionalized(P: Lowering, arguments, _all_bases, **fields):
    """Lower a call of an operator that modifies its operands, in the form that export gives such a call.

    Returns the results of the operator, then the new values of the operands that the operator modifies.
    """
    (operator,) = arguments
    if operator is not official.kv_cache_update:
        raise Unsupported(f"{operator} modifies its operands, which is unsupported; use mlx::kv_cache_update")
    if set(fields) != {"new_values", "start_pos", "ring_size", "_cache_base_index"}:
        raise Unsupported("kv_cache_update of a view of a cache is unsupported; pass the whole cache")
    cache = _all_bases[fields["_cache_base_index"]]
    new_values, ring_size = fields["new_values"], fields["ring_size"]
    if not isinstance(ring_size, int) or ring_size > cache.shape[2]:
        raise Unsupported(f"kv_cache_update: ring_size: got {ring_size}, expected at most {cache.shape[2]} positions")
    written = write_cache(P, cache, new_values, fields["start_pos"], ring_size or None)
    # The operator's own result, of shape [1], has no meaning.
    return [P.full([1], 0.0, new_values.dtype), written]


@REGISTRY.lower(official.custom_sdpa)
def custom_sdpa(P: Lowering, query, key, value, start_pos, attn_mask, dropout_p, is_causal, scale):
    if dropout_p != 0:
        raise Unsupported(f"dropout_p: got {dropout_p}, expected 0")
    end = add(P, start_pos, P.size(query, 2))
    k, v = (P.emit(ir.SliceNode, x=c, axis=2, start=0, stop=end) for c in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask = None if is_causal else attn_mask
    return P.emit(ir.SdpaNode, q=query, k=k, v=v, scale=scale, causal=is_causal, mask=mask)


@REGISTRY.lower(official.rope)
def rope(P: Lowering, x, dims, pos, traditional, base, scale, freqs):
    if freqs is not None and freqs.ndim > 1:
        return P.trace(official.rotate, x, dims, 0, traditional, freqs=freqs)[0]
    offset = P.scalar(pos, torch.int32) if isinstance(pos, int) else pos
    return P.emit(
        ir.RopeNode,
        x=x,
        dims=dims,
        offset=offset,
        traditional=traditional,
        base=base,
        scale=scale,
        freqs=None if freqs is None else P.cast(freqs, torch.float32),
    )


@REGISTRY.lower(official.gather_mm)
def gather_mm(P: Lowering, a, b, rhs_indices, lhs_indices, sorted_indices):
    return P.emit(
        ir.GatherMmNode, a=a, b=b, lhs_indices=lhs_indices, rhs_indices=rhs_indices, **_sorted_flag(P, sorted_indices)
    )


@REGISTRY.lower(official.gather_qmm)
def gather_qmm(
    P: Lowering, x, w, scales, biases, rhs_indices, lhs_indices, transpose, group_size, bits, mode, sorted_indices
):
    # `biases` may be biases or, with an integer dtype, zero points. The program always stores biases.
    weights = [t for t in (w, scales, biases) if t is not None]
    if any(t.space != Space.CONSTANT for t in weights):
        raise Unsupported("weights computed at run time are unsupported; make them parameters or buffers")
    experts, rows, groups = scales.shape

    def packed():
        return official.pack_experts(w.data(), bits)

    def packed_biases():
        return official.expert_biases(scales.data(), None if biases is None else biases.data(), bits)

    dtype = affine_product_dtype(x.dtype, scales.data, packed_biases)
    product = P.emit(
        ir.GatherQmmNode,
        x=P.cast(x, dtype),
        w=P.constant(f"{w.name}.packed", packed, (experts, rows, groups * group_size * bits // 32), torch.uint32),
        scales=P.constant(f"{w.name}.scales", lambda: scales.data().to(dtype), scales.shape, dtype),
        biases=P.constant(f"{w.name}.biases", lambda: packed_biases().to(dtype), scales.shape, dtype),
        lhs_indices=lhs_indices,
        rhs_indices=rhs_indices,
        transpose=transpose,
        group_size=group_size,
        bits=bits,
        mode=mode,
        **_sorted_flag(P, sorted_indices),
    )
    return P.cast(product, x.dtype)


def _sorted_flag(P: Lowering, flag):
    """Return the field `sorted_indices_flag` of an instruction, or no field if `flag` is None."""
    return {} if flag is None else {"sorted_indices_flag": P.item(flag)}


@REGISTRY.lower(official.moe_gather_inputs)
def moe_gather_inputs(P: Lowering, x, expert_indices, top_k, sort_cutoff):
    return P.trace(official.gathered_inputs, x, expert_indices, top_k, sort_cutoff)


@REGISTRY.lower(official.moe_scatter_outputs)
def moe_scatter_outputs(P: Lowering, down, sort_experts, inv_order, top_k):
    return P.trace(official.scattered_outputs, down, sort_experts, inv_order, top_k)[0]


@REGISTRY.lower(torch.ops.kvcache.update_and_attend.default)
def update_and_attend(P: Lowering, q, k, v, position, layer_id, scale, out_dtype):
    """Lower an attention layer whose KV cache belongs to the runtime. Each `layer_id` has its own cache."""
    return P.emit(
        ir.UpdateAndAttendNode,
        q=q,
        k=k,
        v=v,
        position=position,
        layer_id=layer_id,
        scale=scale,
        out_dtype=dtypes.scalar_type(out_dtype),
    )
