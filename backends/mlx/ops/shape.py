"""Operators that rearrange elements: views, permutations, slices, concatenation, splits, repeats and padding.

Most of them are one instruction. For an operator that changes nothing, such as `clone` or a view to the same shape, no
instruction is emitted: the result is the slot of the operand.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import ValueSlot
from ..extents import expressions, is_same_shape
from ..serialization import ir

aten = torch.ops.aten
dim_order_ops = torch.ops.dim_order_ops


def result_shape(P: Lowering, requested=None) -> list:
    """Return the shape of the result as a field of an instruction.

    A static extent is an int. A dynamic extent, at index i, is `requested[i]`: a value slot, or -1, which MLX infers.
    Without `requested`, it is -1. Raises `Unsupported` if more than one extent is -1.
    """
    shape = []
    for i, extent in enumerate(P.out.shape):
        dynamic = requested[i] if requested is not None else -1
        shape.append(extent if isinstance(extent, int) else dynamic)
    if shape.count(-1) > 1:
        raise Unsupported("only one dynamic dimension can be inferred; pass the others, as in x.view(x.shape[0], -1)")
    return shape


def _identity(P: Lowering, self):
    return self


REGISTRY.add(
    [
        aten.alias.default,
        aten.alias_copy.default,
        aten.clone.default,
        aten.detach.default,
        aten.detach_copy.default,
        aten.lift_fresh_copy.default,
        dim_order_ops._clone_dim_order.default,
    ],
    _identity,
)


@REGISTRY.lower(torch.ops.prims.copy_strided.default)
def copy_strided(P: Lowering, a, stride):
    return a  # the order of the elements in memory belongs to torch


@REGISTRY.lower(aten.view.default, aten.view_copy.default, aten._unsafe_view.default)
def view(P: Lowering, self, size):
    if is_same_shape(P.out.shape, self.shape):
        return self
    return P.emit(ir.ReshapeNode, x=self, shape=result_shape(P, size))


@REGISTRY.lower(aten.permute.default, aten.permute_copy.default)
def permute(P: Lowering, self, dims):
    return P.emit(ir.TransposeNode, x=self, perm=[d % max(self.ndim, 1) for d in dims])


@REGISTRY.lower(aten.transpose.int, aten.transpose_copy.int)
def transpose(P: Lowering, self, dim0, dim1):
    perm = list(range(self.ndim))
    if perm:
        perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return P.emit(ir.TransposeNode, x=self, perm=perm)


@REGISTRY.lower(aten.t.default, aten.t_copy.default)
def t(P: Lowering, self):
    return P.emit(ir.TransposeNode, x=self, perm=list(range(self.ndim))[::-1])


@REGISTRY.lower(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(P: Lowering, self, dim):
    return P.emit(ir.ExpandDimsNode, x=self, axis=dim)


@REGISTRY.lower(
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
)
def squeeze(P: Lowering, self, dim=None):
    dims = range(self.ndim) if dim is None else dim if isinstance(dim, list) else [dim]
    ones = [d % self.ndim for d in dims if self.ndim and expressions(self.shape)[d] == 1]
    # In the IR an empty list means every axis of extent 1.
    return P.emit(ir.SqueezeNode, x=self, dims=ones) if ones else self


@REGISTRY.lower(aten.expand.default, aten.expand_copy.default)
def expand(P: Lowering, self, size, implicit=False):
    if is_same_shape(P.out.shape, self.shape):
        return self
    lead = len(size) - self.ndim
    shape = [
        P.size(self, i - lead) if isinstance(extent, int) and extent == -1 else extent for i, extent in enumerate(size)
    ]
    return P.emit(ir.BroadcastToNode, x=self, shape=shape)


@REGISTRY.lower(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(P: Lowering, self, dim, start, end, step):
    extent = self.shape[dim]
    start = 0 if start is None else start
    end = 2**63 - 1 if end is None else end
    if isinstance(extent, int):
        start, end = (_clamped(v, extent) for v in (start, end))
        if start == 0 and end == extent and step == 1:
            return self
    elif isinstance(end, int) and end > 2**31 - 1:
        end = P.size(self, dim)
        if isinstance(start, int) and start == 0 and step == 1:
            return self
    return P.emit(ir.SliceNode, x=self, axis=dim % self.ndim, start=start, stop=end, step=step)


def _clamped(index, extent: int):
    if isinstance(index, ValueSlot):
        return index
    return min(max(index + extent if index < 0 else index, 0), extent)


@REGISTRY.lower(aten.select.int, aten.select_copy.int)
def select(P: Lowering, self, dim, index):
    return P.emit(ir.TakeNode, x=self, index=index, axis=dim % self.ndim)


@REGISTRY.lower(aten.cat.default)
def cat(P: Lowering, tensors, dim):
    # torch ignores empty 1-d tensors in a concatenation of any rank.
    kept = [t for t in tensors if not is_same_shape(t.shape, [0]) or P.out.ndim == 1]
    parts = [P.cast(t, P.out.dtype) for t in kept]
    return P.emit(ir.ConcatenateNode, tensors=parts, axis=dim)


@REGISTRY.lower(aten.stack.default)
def stack(P: Lowering, tensors, dim):
    parts = [P.cast(t, P.out.dtype) for t in tensors]
    return P.emit(ir.StackNode, tensors=parts, axis=dim)


def _split(P: Lowering, x, sizes, dim):
    outs = [P.fresh(v) for v in P.out]
    if len(outs) == 1:
        return [x]
    P.emit(ir.SplitNode, x=x, outs=outs, sizes=sizes, axis=dim % x.ndim)
    return outs


@REGISTRY.lower(aten.split_with_sizes.default, aten.split_with_sizes_copy.default)
def split_with_sizes(P: Lowering, self, split_sizes, dim):
    return _split(P, self, split_sizes, dim)


@REGISTRY.lower(aten.split.Tensor, aten.split_copy.Tensor)
def split(P: Lowering, self, split_size, dim):
    return _split(P, self, _static_sizes(P, dim), dim)


def _static_sizes(P: Lowering, dim) -> list[int]:
    """Return the size of each part of a split. Raises `Unsupported` if a size is dynamic."""
    sizes = [v.shape[dim] for v in P.out]
    if not all(isinstance(s, int) for s in sizes):
        raise Unsupported("an equal split of a dynamic dimension is unsupported; pass the sizes, as in x.split([a, b])")
    return sizes


@REGISTRY.lower(aten.unbind.int, aten.unbind_copy.int)
def unbind(P: Lowering, self, dim):
    return [P.emit(ir.TakeNode, x=self, index=i, axis=dim % self.ndim) for i in range(len(P.out))]


@REGISTRY.lower(aten.repeat.default)
def repeat(P: Lowering, self, repeats):
    return P.emit(ir.TileNode, x=self, reps=repeats)


@REGISTRY.lower(aten.repeat_interleave.self_int)
def repeat_interleave(P: Lowering, self, repeats, dim=None, output_size=None):
    if dim is None:
        self, dim = P.emit(ir.ReshapeNode, x=self, shape=[-1]), 0
        return P.emit(ir.RepeatNode, x=self, repeats=repeats, axis=0)
    return P.emit(ir.RepeatNode, x=self, repeats=repeats, axis=dim % self.ndim)


@REGISTRY.lower(aten.flip.default)
def flip(P: Lowering, self, dims):
    return P.emit(ir.FlipNode, x=self, axes=[d % self.ndim for d in dims]) if dims and self.ndim else self


@REGISTRY.lower(aten.roll.default)
def roll(P: Lowering, self, shifts, dims):
    if dims:
        return P.emit(ir.RollNode, x=self, shift=shifts, axes=[d % self.ndim for d in dims])
    flat = P.emit(ir.ReshapeNode, x=self, shape=[-1])
    rolled = P.emit(ir.RollNode, x=flat, shift=shifts, axes=[0])
    return P.emit(ir.ReshapeNode, x=rolled, shape=result_shape(P))


@REGISTRY.lower(aten.constant_pad_nd.default)
def constant_pad_nd(P: Lowering, self, pad, value):
    # `pad` is a list of widths before and after each dimension. torch lists the dimensions from the last to the first,
    # MLX from the first to the last. A negative width crops the dimension.
    pairs = [pad[i : i + 2] for i in range(0, len(pad), 2)][::-1]
    pairs = [[0, 0]] * (self.ndim - len(pairs)) + pairs
    x = self
    for axis, (before, after) in enumerate(pairs):
        if any(isinstance(v, int) and v < 0 for v in (before, after)):
            extent = x.shape[axis]
            if not isinstance(extent, int):
                raise Unsupported("negative padding of a dynamic dimension is unsupported; slice it instead")
            stop = extent + min(after, 0)
            x = P.emit(ir.SliceNode, x=x, axis=axis, start=-min(before, 0), stop=stop)
    widths = [max(v, 0) if isinstance(v, int) else v for pair in pairs for v in pair]
    if not any(widths):
        return x
    if not self.dtype.is_floating_point and torch.tensor(value, dtype=torch.float32).item() != value:
        # The field is a float32, which holds few of the large integers. Integers wrap around, so that the sum is exact.
        value = P.scalar(value, self.dtype)
        difference = P.emit(ir.SubtractNode, a=x, b=value)
        padded = P.emit(ir.PadNode, x=difference, pad_width=widths, mode="constant", constant_value=0.0)
        return P.emit(ir.AddNode, a=padded, b=value)
    return P.emit(ir.PadNode, x=x, pad_width=widths, mode="constant", constant_value=float(value))


@REGISTRY.lower(aten.copy.default)
def copy(P: Lowering, self, src):
    source = P.cast(src, self.dtype)
    if is_same_shape(src.shape, self.shape):
        return source
    extents = [P.size(self, i) for i in range(self.ndim)]
    return P.emit(ir.BroadcastToNode, x=source, shape=extents)
