"""The rules that derive the split of an operator's result from the splits of its operands.

A rule gets the analysis and a node with at least one split operand. It returns the `Split` of the result, or None if
the result is whole, or a list of these if the operator has several results. It raises CannotSplit if the operator needs
a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import torch

from .analysis import Analysis, permutation_of, product_of_sizes, shape_of, sizes_of
from .layout import CannotSplit, Refine, Segment, Split

aten, mlx = torch.ops.aten, torch.ops.mlx
Rule = Callable[[Analysis, torch.fx.Node], Split | list | None]


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


# Elementwise ----------------------------------------------------------------------------


def elementwise(analysis: Analysis, node: torch.fx.Node) -> Split:
    rank = len(shape_of(node))
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    result = None
    for n in tensors:
        split = analysis.split_of(n)
        if split is not None:
            split = split.at(split.axis + rank - len(shape_of(n)))
            result = split if result is None else common_split(result, split)
    _localize_whole_operands(analysis, node, tensors, result)
    return result


def _localize_whole_operands(analysis: Analysis, node: torch.fx.Node, tensors, split: Split) -> None:
    """Replace the whole operands of `node` by their parts, except those that broadcast along the split axis."""
    rank = len(shape_of(node))
    for n in tensors:
        axis = split.axis - (rank - len(shape_of(n)))
        if analysis.split_of(n) is None and axis >= 0 and shape_of(n)[axis] != 1:
            analysis.localize(node, n, axis, split)


def common_split(first: Split, second: Split) -> Split:
    """Return the common split of two operands of an elementwise operator. Raises Refine if their segments differ."""
    if first.axis != second.axis or first.size != second.size:
        raise CannotSplit("two tensors that are split along different axes")
    segments_at(first, _bounds(second))
    segments_at(second, _bounds(first))
    for a, b in zip(first.segments, second.segments):
        if a.copies != b.copies:
            few, many, split = (a, b, first) if a.copies < b.copies else (b, a, second)
            _raise_refine(split, few, [few.size], many.copies)
    return first.merged(second)


def _bounds(split: Split) -> list[int]:
    bounds = [0]
    for segment in split.segments:
        bounds.append(bounds[-1] + segment.size)
    return bounds


def segments_at(split: Split, bounds: list[int]) -> dict[int, int]:
    """Return bound → index of the segment that begins there. Raises Refine if one of `bounds` is inside a segment."""
    begins = {bound: index for index, bound in enumerate(_bounds(split))}
    for index, segment in enumerate(split.segments):
        begin = _bounds(split)[index]
        inside = sorted({bound - begin for bound in bounds if begin < bound < begin + segment.size})
        if inside:
            ends = [*inside, segment.size]
            _raise_refine(split, segment, [end - start for start, end in zip([0, *inside], ends)], segment.copies)
    return {bound: begins[bound] for bound in bounds}


def _raise_refine(split: Split, segment: Segment, sizes: list[int], copies: int) -> None:
    parts = [size * split.unit for size in sizes]
    if not segment.origins or any(part.denominator != 1 for part in parts):
        raise CannotSplit("parts of a tensor whose weights are not known")
    weight, index = min(segment.origins)
    raise Refine(weight, index, tuple(Segment(int(part), copies) for part in parts))


def same_as_first(analysis: Analysis, node: torch.fx.Node) -> Split | None:
    return analysis.split_of(node.args[0])


# Axes -----------------------------------------------------------------------------------


def transpose(analysis: Analysis, node: torch.fx.Node) -> Split:
    split = analysis.split_of(node.args[0])
    return split.at(permutation_of(node).index(split.axis))


def unsqueeze(analysis: Analysis, node: torch.fx.Node) -> Split:
    split, dim = analysis.split_of(node.args[0]), node.args[1] % len(shape_of(node))
    return split.at(split.axis + (dim <= split.axis))


def squeeze(analysis: Analysis, node: torch.fx.Node) -> Split:
    split, x = analysis.split_of(node.args[0]), node.args[0]
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    dims = [dim % len(shape_of(x)) for dim in dims]
    if split.axis in dims:
        raise CannotSplit("squeeze of a split axis")
    return split.at(split.axis - sum(dim < split.axis and sizes_of(x)[dim] == 1 for dim in dims))


def expand(analysis: Analysis, node: torch.fx.Node) -> Split:
    split, x = analysis.split_of(node.args[0]), node.args[0]
    axis = split.axis + len(shape_of(node)) - len(shape_of(x))
    set_size(analysis, node, axis, split)
    return split.at(axis)


def set_size(analysis: Analysis, node: torch.fx.Node, axis: int, split: Split) -> None:
    """Set the size at `axis` in the arguments of `node`, a view or an expand, to the size of the part of a process."""
    if node.args[1][axis] != -1:
        analysis.edits.append(lambda r: r.set_size(node, axis, split.local_size(r.processes)))


def view(analysis: Analysis, node: torch.fx.Node) -> Split:
    x = node.args[0]
    split = analysis.split_of(x)
    inputs, outputs = _axis_group(sizes_of(x), sizes_of(node), split.axis)
    if inputs[0] != split.axis:
        raise CannotSplit(f"{node.target} merges a split axis with the axis before it")
    merged = product_of_sizes(sizes_of(x)[axis] for axis in inputs[1:])
    divided = product_of_sizes(sizes_of(node)[axis] for axis in outputs[1:])
    ratio = Fraction(merged, divided)
    sizes = [segment.size * ratio for segment in split.segments]
    if any(size.denominator != 1 for size in sizes):
        raise CannotSplit(f"{node.target} divides a split axis within a part")
    segments = tuple(replace(s, size=int(size)) for s, size in zip(split.segments, sizes))
    result = Split(outputs[0], segments, split.unit / ratio, split.sources)
    if node.target == aten.unflatten.int:
        _set_unflattened_size(analysis, node, result)
    elif node.target != aten.flatten.using_ints:
        set_size(analysis, node, outputs[0], result)
    return result


def _set_unflattened_size(analysis: Analysis, node: torch.fx.Node, split: Split) -> None:
    x, dim, sizes = node.args
    position = split.axis - dim % len(shape_of(x))
    if 0 <= position < len(sizes) and sizes[position] != -1:
        changed = list(sizes)
        changed[position] = split.local_size(analysis.processes)
        analysis.edits.append(lambda r: r.set_argument(node, 2, changed))


def _axis_group(inputs: list[int], outputs: list[int], axis: int) -> tuple[list[int], list[int]]:
    """Return the axes of the operand and of the result of a view that hold the same elements as the input axis `axis`.

    For a view of [2, 12, 5] as [2, 3, 4, 5], `axis` 1 gives ([1], [1, 2]). Axes of size 1 are left out.
    """
    i = j = 0
    while i < len(inputs) or j < len(outputs):
        first, second = [], []
        left = right = 1
        while not first or not second or left != right:
            if (left <= right and i < len(inputs)) or j >= len(outputs):
                if inputs[i] != 1:
                    first.append(i)
                left *= inputs[i]
                i += 1
            else:
                if outputs[j] != 1:
                    second.append(j)
                right *= outputs[j]
                j += 1
            if i >= len(inputs) and j >= len(outputs):
                break
        if axis in first:
            return first, second
    raise CannotSplit("view of a split axis of size 1")


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
    _localize_whole_operands(analysis, node, node.args[:2], result)
    return replace(result, segments=tuple(replace(s, origins=frozenset()) for s in result.segments))


# Parts of an axis -----------------------------------------------------------------------


def slice_(analysis: Analysis, node: torch.fx.Node) -> Split:
    x, dim, begin, end, step = _slice_arguments(node)
    split = analysis.split_of(x)
    if dim != split.axis:
        return split
    begin, end = (0 if begin is None else begin), (split.size if end is None else min(end, split.size))
    begin, end = (value + split.size if value < 0 else value for value in (begin, end))
    if step != 1:
        return _every_nth(analysis, node, split, begin, end, step)
    (part,) = _splits_of_ranges(split, [(begin, end)])
    index = segments_at(split, [begin])[begin]
    analysis.edits.append(
        lambda r: r.set_slice(node, _local_begin(split, index, r.processes), part.local_size(r.processes))
    )
    return part


def _every_nth(analysis: Analysis, node: torch.fx.Node, split: Split, begin: int, end: int, step: int) -> Split:
    """The rule for a slice such as `x[..., 1::2]`. Each process takes this slice of its own part."""
    if len(split.segments) > 1 or split.size % step or begin >= step or end != split.size:
        raise CannotSplit("every n-th entry of a part of a split axis")
    (segment,) = split.segments
    analysis.edits.append(lambda r: r.set_slice(node, begin, split.local_size(r.processes) - begin))
    part = replace(segment, size=segment.size // step, origins=frozenset())
    return replace(split, segments=(part,), unit=split.unit * step)


def _slice_arguments(node: torch.fx.Node):
    x, dim, begin, end, step = (list(node.args) + [0, None, None, 1][len(node.args) - 1 :])[:5]
    return x, dim % len(shape_of(x)), begin, end, step


def _local_begin(split: Split, index: int, processes: int) -> int:
    return sum(segment.local_size(processes) for segment in split.segments[:index])


def _splits_of_ranges(split: Split, ranges: list[tuple[int, int]]) -> list[Split]:
    index = segments_at(split, sorted({bound for pair in ranges for bound in pair}))
    return [replace(split, segments=split.segments[index[begin] : index[end]]) for begin, end in ranges]


def split_or_chunk(analysis: Analysis, node: torch.fx.Node) -> list[Split]:
    """The rule for `split`, `split_with_sizes` and `chunk`."""
    x, dim = node.args[0], (node.args[2] if len(node.args) > 2 else 0) % len(shape_of(node.args[0]))
    split, results = analysis.split_of(x), node.meta["val"]
    if dim != split.axis:
        return [split] * len(results)
    ranges, begin = [], 0
    for result in results:
        ranges.append((begin, begin + result.shape[dim]))
        begin += result.shape[dim]
    parts = _splits_of_ranges(split, ranges)
    analysis.edits.append(lambda r: r.set_split(node, [part.local_size(r.processes) for part in parts], dim))
    return parts


def unbind(analysis: Analysis, node: torch.fx.Node) -> list[Split]:
    x, dim = node.args[0], (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node.args[0]))
    return [_split_without_axis(analysis.split_of(x), dim)] * len(node.meta["val"])


def select(analysis: Analysis, node: torch.fx.Node) -> Split:
    return _split_without_axis(analysis.split_of(node.args[0]), node.args[1] % len(shape_of(node.args[0])))


def _split_without_axis(split: Split, dim: int) -> Split:
    if dim == split.axis:
        raise CannotSplit("a single entry of a split axis")
    return split.at(split.axis - (dim < split.axis))


def concatenate(analysis: Analysis, node: torch.fx.Node) -> Split:
    tensors = node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node))
    splits = [analysis.split_of(n) for n in tensors]
    found = [split for split in splits if split is not None]
    if any(split.axis != dim for split in found):
        result = found[0]
        for split in found[1:]:
            result = common_split(result, split)
        _localize_whole_operands(analysis, node, tensors, result)
        return result
    if len(found) < len(tensors) or len({split.unit for split in found}) > 1:
        raise CannotSplit("a concatenation of a part with a whole tensor")
    segments = tuple(segment for split in found for segment in split.segments)
    return replace(found[0], segments=segments, sources=frozenset().union(*(split.sources for split in found)))


def stack(analysis: Analysis, node: torch.fx.Node) -> Split:
    tensors = node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node))
    result = None
    for n in tensors:
        split = analysis.split_of(n)
        if split is None:
            raise CannotSplit("a stack of a part and a whole tensor")
        result = split if result is None else common_split(result, split)
    return result.at(result.axis + (dim <= result.axis))


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
    for argument in (*node.args[_SINKS:_SLOPES], *node.args[_SLOPES : _SLOPES + 1]):
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
