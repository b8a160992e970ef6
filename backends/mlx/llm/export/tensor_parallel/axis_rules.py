"""The rules for operators that move, divide, join or remove axes: see `rules.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import torch

from .analysis import Analysis, permutation_of, shape_of, sizes_of
from .layout import CannotSplit, Split, common_split, segments_at

aten = torch.ops.aten

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
    merged = math.prod(sizes_of(x)[axis] for axis in inputs[1:])
    divided = math.prod(sizes_of(node)[axis] for axis in outputs[1:])
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
        analysis.localize_operands(node, tensors, result)
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
