"""The rules that derive the split of an operator's result from the splits of its operands.

A rule gets the analysis and a node with at least one split operand. It returns the `Split` of the result, or None if
the result is whole, or a list of these if the operator has several results. It raises CannotSplit if the operator needs
a whole tensor. The rules for operators on axes are in `axis_rules.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .analysis import Analysis, Rule, shape_of
from .axis_rules import (
    concatenate, expand, select, slice_, split_or_chunk, squeeze, stack, transpose, unbind, unsqueeze, view,
)
from .layout import CannotSplit, Split, common_split

aten, mlx = torch.ops.aten, torch.ops.mlx


def rule_of(node: torch.fx.Node) -> Rule:
    """Return the rule for the operator of `node`. Raises CannotSplit if there is none."""
    if node.op == "output":
        raise CannotSplit("a result of the model")
    rule = RULES.get(node.target)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = elementwise
    if rule is None:
        raise CannotSplit(f"no rule for {node.target}")
    return rule


# Elementwise operators and products ----------------------------------------------------


def elementwise(analysis: Analysis, node: torch.fx.Node) -> Split:
    rank = len(shape_of(node))
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    result = None
    for n in tensors:
        split = analysis.split_of(n)
        if split is not None:
            split = split.at(split.axis + rank - len(shape_of(n)))
            result = split if result is None else common_split(result, split)
    analysis.localize_operands(node, tensors, result)
    return result


def same_as_first(analysis: Analysis, node: torch.fx.Node) -> Split | None:
    return analysis.split_of(node.args[0])


def batched_matmul(analysis: Analysis, node: torch.fx.Node) -> Split:
    """The rule for a product of two tensors that are split along a batch axis, such as the heads."""
    rank = len(shape_of(node))
    result = None
    for n in node.args[:2]:
        split = analysis.split_of(n)
        if split is None:
            continue
        split = split.at(split.axis + rank - len(shape_of(n)))
        if split.axis >= rank - 2:
            raise CannotSplit(f"{node.target} multiplies a split axis")
        result = split if result is None else common_split(result, split)
    analysis.localize_operands(node, node.args[:2], result)
    return replace(result, segments=tuple(replace(s, origins=frozenset()) for s in result.segments))


# Reductions -----------------------------------------------------------------------------


def mean(analysis: Analysis, node: torch.fx.Node) -> Split | None:
    split = analysis.split_of(node.args[0])
    if split.axis not in _reduced_dims(node):
        return _split_of_reduced(node, split)
    if len(split.segments) > 1 or split.segments[0].copies > 1 or len(_reduced_dims(node)) > 1:
        raise CannotSplit("a mean over parts of several tensors")
    analysis.edits.append(lambda r: r.mean_after(node))
    return None


def reduction(analysis: Analysis, node: torch.fx.Node) -> Split:
    split = analysis.split_of(node.args[0])
    if split.axis in _reduced_dims(node):
        raise CannotSplit(f"{node.target} over a split axis")
    return _split_of_reduced(node, split)


def _reduced_dims(node: torch.fx.Node) -> list[int]:
    rank = len(shape_of(node.args[0]))
    dims = node.args[1] if len(node.args) > 1 else None
    dims = list(range(rank)) if dims in (None, []) else dims if isinstance(dims, (list, tuple)) else [dims]
    return [dim % rank for dim in dims]


def _split_of_reduced(node: torch.fx.Node, split: Split) -> Split:
    if len(shape_of(node)) == len(shape_of(node.args[0])):
        return split
    return split.at(split.axis - sum(dim < split.axis for dim in _reduced_dims(node)))


def along_axis(analysis: Analysis, node: torch.fx.Node) -> Split:
    """The rule for operators such as softmax, whose second argument is an axis, and whose result has the same shape."""
    split = analysis.split_of(node.args[0])
    if node.args[1] % len(shape_of(node)) == split.axis:
        raise CannotSplit(f"{node.target} over a split axis")
    return split


def norm(analysis: Analysis, node: torch.fx.Node) -> Split:
    """The rule for norms over the last axes."""
    split = analysis.split_of(node.args[0])
    if split.axis >= len(shape_of(node.args[0])) - len(node.args[1]):
        raise CannotSplit(f"{node.target} over a split axis")
    return split


# Caches ---------------------------------------------------------------------------------


def update_cache(analysis: Analysis, node: torch.fx.Node) -> Split:
    cache, update = node.args[:2]
    split = analysis.split_of(update)
    if split is None or split.axis != 1 or analysis.name_of(cache) is None:
        raise CannotSplit("a cache that is split along another axis than its heads")
    analysis.split_tensor(cache, 1, split.segments)
    return split


def copy_to_buffer(analysis: Analysis, node: torch.fx.Node) -> Split:
    split, buffer = analysis.split_of(node.args[1]), node.args[0]
    if split is None or analysis.name_of(buffer) is None:
        raise CannotSplit("a copy to a part of a tensor")
    analysis.split_tensor(buffer, split.axis, split.segments)
    return split


_SINKS, _SLOPES = 10, 11  # the indices of these arguments of mlx::cached_attention


def attend(analysis: Analysis, node: torch.fx.Node) -> Split:
    query, keys, values = (analysis.split_of(n) for n in node.args[:3])
    heads = shape_of(node.args[1])[1]
    if query is None or query.axis != 1 or len(query.segments) > 1:
        raise CannotSplit("attention of all queries to a part of the keys")
    if any(split is None for split in (keys, values)) and heads > 1:
        raise CannotSplit(f"attention of a part of the queries to all of the {heads} key heads")
    for split in (keys, values):
        if split is not None and (split.axis != 1 or len(split.segments) > 1):
            raise CannotSplit("keys that are split along another axis than their heads")
    result = query
    for split in (keys, values):
        if split is not None:
            result = replace(result, sources=result.sources | split.sources)
    for argument in node.args[_SINKS : _SLOPES + 1]:
        if isinstance(argument, torch.fx.Node):
            analysis.localize(node, argument, 0, result)
    # The weights that compute the queries do not compute the output.
    return replace(result, segments=tuple(replace(s, origins=frozenset()) for s in result.segments))


def size_of_axis(analysis: Analysis, node: torch.fx.Node) -> None:
    if node.args[1] % len(shape_of(node.args[0])) == analysis.split_of(node.args[0]).axis:
        raise CannotSplit("the size of a split axis")


def no_result(analysis: Analysis, node: torch.fx.Node) -> None:
    """The rule for operators without a result."""


RULES: dict = {
    **dict.fromkeys(
        (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.contiguous.default, aten.clone.default,
         aten.alias.default, aten.detach.default, aten.detach_.default, aten.dropout.default, aten._to_copy.default),
        same_as_first,
    ),
    **dict.fromkeys(
        (aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default, aten.mT.default), transpose
    ),
    **dict.fromkeys(
        (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
         aten.unflatten.int),
        view,
    ),
    **dict.fromkeys((aten.matmul.default, aten.bmm.default), batched_matmul),
    **dict.fromkeys(
        (aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default), split_or_chunk
    ),
    **dict.fromkeys(
        (aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.dim, aten.var.correction, aten.any.dim),
        reduction,
    ),
    **dict.fromkeys(
        (aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten.cumsum.default), along_axis
    ),
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), norm),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), squeeze),
    aten.type_as.default: same_as_first,
    aten.mean.dim: mean,
    aten.unsqueeze.default: unsqueeze,
    aten.expand.default: expand,
    aten.slice.Tensor: slice_,
    aten.select.int: select,
    aten.unbind.int: unbind,
    aten.cat.default: concatenate,
    aten.stack.default: stack,
    aten.copy_.default: copy_to_buffer,
    aten.sym_size.int: size_of_axis,
    aten._assert_tensor_metadata.default: no_result,
    mlx.cache_update.default: update_cache,
    mlx.cached_attention.default: attend,
}  # fmt: skip
