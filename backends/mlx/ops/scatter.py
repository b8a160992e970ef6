"""Writes by index tensor or mask (index_put, scatter, masked_scatter), and embedding_bag.

An `index_put` of whole slices is an `IndexCopyNode`, which updates a buffer in place. The other writes are decomposed
in torch into `index_copy`, `scatter_add` and `where`.
"""

from __future__ import annotations

import math

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..extents import is_empty, is_same_shape
from ..serialization import ir
from .lib.flat_index import flat_element_index, flat_index

aten = torch.ops.aten


# -- index_put ----------------------------------------------------------------


@REGISTRY.lower(aten.index_put.default)
def index_put(P: Lowering, self, indices, values, accumulate):
    axes = [axis for axis, i in enumerate(indices) if i is not None]
    used = [indices[axis] for axis in axes]
    if not used:
        raise Unsupported("a call without an index is unsupported; use torch.where or copy_")
    if any(i.dtype in (torch.bool, torch.uint8) for i in used):
        return _masked_put(P, self, axes, used, values, accumulate)
    if len(used) == 1 and used[0].ndim == 1 and not accumulate:
        return _put_slices(P, self, axes[0], used[0], values)
    return P.trace(_index_put, self, axes, used, values, accumulate)[0]


def _put_slices(P: Lowering, x, axis, index, values):
    update = P.cast(values, x.dtype)
    if not is_same_shape(update.shape, [*x.shape[:axis], index.shape[0], *x.shape[axis + 1 :]]):
        extents = [P.size(x, i) for i in range(x.ndim)]
        extents[axis] = P.size(index, 0)
        update = P.emit(ir.BroadcastToNode, x=update, shape=extents)
    target = P.in_place_target(x)
    return P.emit(
        ir.IndexCopyNode, dst=x, update=update, indices=index, axis=axis, **({} if target is None else {"out": target})
    )


def _masked_put(P: Lowering, x, axes, masks, values, accumulate):
    """Lower `index_put` with a mask over the leading axes, which writes a single value where the mask is set."""
    if len(masks) != 1 or axes != [0] or masks[0].dtype != torch.bool:
        raise Unsupported("a mask combined with other indices is unsupported; use one bool mask or torch.where")
    if math.prod(values.shape) != 1:
        raise Unsupported("several values under a mask are unsupported; use torch.where or masked_scatter")
    return P.trace(_put_value, x, masks[0], values, accumulate)[0]


def _put_value(x, mask, value, accumulate):
    mask = mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim()))
    value = value.reshape(()).to(x.dtype)
    return torch.where(mask, x + value if accumulate else value, x)


def _index_put(x, axes, indices, values, accumulate):
    """Move the indexed axes to the front, flatten them to one axis and write along that axis."""
    others = [a for a in range(x.dim()) if a not in axes]
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    linear = flat_index(x, axes, indices).expand(shape)
    kept = [x.shape[a] for a in others]
    # In the shape of the values, the axes of the index take the place of the indexed axes if these are adjacent.
    # Otherwise the axes of the index come first.
    first = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0
    values = values.to(x.dtype).expand([*kept[:first], *shape, *kept[first:]])
    values = values.movedim(list(range(first, first + len(shape))), list(range(len(shape))))
    moved = x.permute(*axes, *others)
    flat = moved.reshape(math.prod(x.shape[a] for a in axes), math.prod(kept))
    linear, values = linear.reshape(-1), values.reshape(-1, math.prod(kept))
    if accumulate:
        flat = flat.scatter_add(0, linear.unsqueeze(-1).expand(values.shape), values)
    else:
        flat = flat.index_copy(0, linear, values)
    back = [0] * x.dim()
    for position, axis in enumerate((*axes, *others)):
        back[axis] = position
    return flat.reshape(moved.shape).permute(back)


# -- scatter ------------------------------------------------------------------


@REGISTRY.lower(aten.scatter.src, aten.scatter.value)
def scatter(P: Lowering, self, dim, index, src=None, value=None):
    if self.ndim == 0:
        raise Unsupported("0-d input is unsupported; reshape it to [1] first")
    if is_empty(index.shape):
        return self
    return P.trace(_scatter, self, dim % self.ndim, index, value if src is None else src)[0]


def _scatter(x, dim, index, src):
    if isinstance(src, torch.Tensor):
        for axis, extent in enumerate(index.shape):
            src = src.narrow(axis, 0, extent)
        src = src.to(x.dtype)
    else:
        src = torch.full((), src, dtype=x.dtype, device=x.device)
    src = src.expand(index.shape).reshape(-1)
    return x.reshape(-1).index_copy(0, flat_element_index(x, dim, index).reshape(-1), src).reshape(x.shape)


@REGISTRY.lower(aten.masked_scatter.default)
def masked_scatter(P: Lowering, self, mask, source):
    return P.trace(_masked_scatter, self, mask, source)[0]


def _masked_scatter(x, mask, source):
    """Replace the element of `x` at the nth set position of `mask` by the nth element of `source`."""
    x, mask = torch.broadcast_tensors(x, mask)
    source = source.reshape(-1)
    if source.shape[0] == 0:
        return x
    nth = torch.cumsum(mask.reshape(-1), 0) - 1
    taken = source[torch.clamp(nth, 0, source.shape[0] - 1)]
    return torch.where(mask, taken.reshape(x.shape), x)


# -- embedding_bag ------------------------------------------------------------


@REGISTRY.lower(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    P: Lowering,
    weight,
    indices,
    offsets,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    include_last_offset,
    padding_idx,
):
    """Lower the first result, the pooled embeddings. The three other results, which serve the gradient, are None.

    Raises `Unsupported` if an FX node uses another result than the first.
    """
    for user in P.node.users:
        if user.args[1] != 0:
            raise Unsupported(f"result {user.args[1]} is unsupported; use only the first one, the pooled embeddings")
    (out,) = P.trace(
        _embedding_bag, weight, indices, offsets, mode, per_sample_weights, include_last_offset, padding_idx
    )
    return [out, None, None, None]


def _embedding_bag(weight, indices, offsets, mode, factors, include_last_offset, padding_idx):
    """Return the sum (mode 0), mean (1) or maximum (2) of the embeddings of each bag, computed in float32.

    `member` is a mask [bags, indices]: which indices belong to which bag.
    """
    position = torch.arange(indices.shape[0], device=weight.device)
    started = position.unsqueeze(0) >= offsets.unsqueeze(1)
    none = torch.zeros_like(started[:1])
    started, ended = (started[:-1], started[-1:]) if include_last_offset else (started, none)
    member = started & ~torch.cat([started[1:], ended])
    # As in torch, the mean of the last bag counts all remaining indices, wherever the last offset is.
    counted = started & ~torch.cat([started[1:], none]) if mode == 1 else member
    if padding_idx >= 0:
        present = (indices != padding_idx).unsqueeze(0)
        member, counted = member & present, counted & present
    embeddings = weight[indices].float()
    count = counted.sum(1, keepdim=True)
    if mode == 2:
        out = torch.where(member.unsqueeze(-1), embeddings.unsqueeze(0), float("-inf")).amax(1)
        out = torch.where(count > 0, out, torch.zeros_like(out))
    else:
        embeddings = embeddings if factors is None else embeddings * factors.float().unsqueeze(-1)
        out = torch.where(member.unsqueeze(-1), embeddings.unsqueeze(0), 0.0).sum(1)
        out = out / torch.clamp(count, min=1) if mode == 1 else out
    return out.to(weight.dtype)
