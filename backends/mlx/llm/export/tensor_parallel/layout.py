"""How an axis is split among the processes of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import torch


class CannotSplit(Exception):
    """Raised if an operator needs a whole tensor. The weights that the tensor comes from then stay whole."""


class Refine(Exception):
    """Raised if a weight needs other segments: `parts` take the place of its segment `index`."""

    def __init__(self, weight: str, index: int, parts: tuple[Segment, ...]):
        super().__init__(weight)
        self.weight, self.index, self.parts = weight, index, parts


@dataclass(frozen=True)
class Segment:
    """A part of an axis, such as the queries in a projection of queries and keys. Each process has a block of it.

    `size` is the number of entries. `copies` consecutive processes have the same block. `origins` says what
    computes this segment: the names of weights, each with the index of one of its segments.
    """

    size: int
    copies: int = 1
    origins: frozenset[tuple[str, int]] = frozenset()

    def local_size(self, processes: int) -> int:
        """Return the number of entries in the block of a process."""
        return self.size * self.copies // processes

    def begin(self, rank: int, processes: int) -> int:
        """Return the index of the first entry in the block of the process `rank`."""
        return rank // self.copies * self.local_size(processes)


@dataclass(frozen=True)
class Split:
    """A tensor of which each process has a part.

    The axis `axis` consists of `segments`. An entry of a segment stands for `unit` outputs of the weights that compute
    the tensor.
    `sources` are the names of the weights that stay whole if the tensor cannot be split.
    """

    axis: int
    segments: tuple[Segment, ...]
    unit: Fraction
    sources: frozenset[str]

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    def local_size(self, processes: int) -> int:
        return sum(segment.local_size(processes) for segment in self.segments)

    def at(self, axis: int) -> Split:
        return replace(self, axis=axis)

    def merged(self, other: Split) -> Split:
        """Return this split with the origins and sources of both, whose segments have the same sizes and copies."""
        segments = tuple(replace(a, origins=a.origins | b.origins) for a, b in zip(self.segments, other.segments))
        return replace(self, segments=segments, sources=self.sources | other.sources)


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


def take(tensor: torch.Tensor, axis: int, segments: tuple[Segment, ...], rank: int, processes: int, scale=Fraction(1)):
    """Return the part of `tensor` that the process `rank` has.

    `scale` is the number of elements along `axis` for each entry of a segment. If the axis is shorter than the
    segments, it is padded with zeros.
    """
    parts, offset = [], 0
    for segment in segments:
        begin, length = offset + segment.begin(rank, processes), segment.local_size(processes)
        parts.append(_narrow_padded(tensor, axis, int(begin * scale), int(length * scale)))
        offset += segment.size
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _narrow_padded(tensor: torch.Tensor, axis: int, begin: int, length: int) -> torch.Tensor:
    missing = max(0, begin + length - tensor.shape[axis])
    part = tensor.narrow(axis, min(begin, tensor.shape[axis]), max(0, length - missing))
    if not missing:
        return part
    shape = list(tensor.shape)
    shape[axis] = min(missing, length)
    return torch.cat([part, tensor.new_zeros(shape)], axis)
