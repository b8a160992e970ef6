"""Rotary position embedding (RoPE) as Hugging Face models write it, fused to `RopeNode`.

    x * cos(angles) + cat(-x[half:], x[:half]) * sin(angles),   angles = cat(f, f),   f = positions ⊗ inv_freq

The positions may be consecutive, `arange(S) + offset`, or any integers, if x holds one sequence, or one token of each
of several sequences. A model may rotate only the first elements of the last axis (partial RoPE).

`RopeNode` expects the positions along axis -2 of x. Models also use other layouts, such as [B, S, H, D]. The pattern
therefore follows the axis of the positions and the axis of the frequencies through the graph, up to the product with x.
If the axis of the positions is not axis -2 of x, the fusion transposes x. The axis of positions that are not
consecutive becomes the axis of the sequences, because `RopeNode` takes one offset for each sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from ..builder.lowering import Lowering
from ..builder.matcher import (
    CASTS,
    UNSQUEEZES,
    Match,
    Matcher,
    NoMatch,
    attempt,
    extents,
    is_call,
    is_last_axis,
    tensor,
)
from ..builder.peephole import can_represent
from ..builder.registry import REGISTRY
from ..serialization import ir

_SLICE = ("aten.slice_copy.Tensor", "aten.slice.Tensor")
_ADD = ("aten.add.Tensor",)
_MUL = ("aten.mul.Tensor",)
_CAT = ("aten.cat.default",)
_NEG = ("aten.neg.default",)
_ARANGE = ("aten.arange.start_step", "aten.arange.default", "aten.arange.start")


class _AngleAxes(NamedTuple):
    """Describes a tensor that depends on positions, on frequencies, or on both.

    `offset` is the first position, or all positions if they are not `consecutive`. `position_axis` is the axis of the
    positions. `inv_freq` holds the frequencies, and `frequency_axis` is their axis. Axes are counted from the right: 0
    is the last axis. All other axes have extent 1. `offset` and `position_axis` are None if the tensor does not depend
    on positions. `inv_freq` and `frequency_axis` are None if it does not depend on frequencies.
    """

    offset: Node | None = None
    consecutive: bool = True
    position_axis: int | None = None
    inv_freq: Node | None = None
    frequency_axis: int | None = None

    def unsqueezed(self, axis: int) -> _AngleAxes:
        """Return the axes after an unsqueeze, whose new axis is axis `axis` of the result, counted from the right."""
        shifted = (None if a is None else a + (a >= axis) for a in (self.position_axis, self.frequency_axis))
        position_axis, frequency_axis = shifted
        return self._replace(position_axis=position_axis, frequency_axis=frequency_axis)


class _Follower:
    """Computes the `_AngleAxes` of a node from its operands.

    The nodes that it visits do not join the match, because they may have other users. `out` is the dtype of the
    rotated tensor.
    """

    def __init__(self, P: Lowering, out: torch.dtype):
        self.P = P
        self.out = out

    def axes(self, node) -> _AngleAxes:
        """Return the positions and frequencies on which `node` depends, and their axes.

        `node` may be positions, frequencies or their product, with casts and unsqueezes at any point.
        """
        m = Matcher(self.P)  # the nodes that this matcher collects are not used
        value = tensor(node)
        if is_call(node, *UNSQUEEZES):
            x, axis = m.arguments(node, UNSQUEEZES, "self", "dim")
            return self.axes(x).unsqueezed(value.ndim - 1 - axis % value.ndim)
        if is_call(node, *CASTS):
            return self.axes(_before_cast(m, node, torch.float32))
        if is_call(node, *_MUL):
            return self._product(*map(self.axes, m.arguments(node, _MUL, "self", "other")))
        if self.P.is_constant(node) and value.ndim == 1:
            return _AngleAxes(inv_freq=node, frequency_axis=0)
        offset = self._offset(m, node)
        if offset is not node:
            return _AngleAxes(offset=offset, position_axis=0)
        return _AngleAxes(offset=node, consecutive=False, position_axis=_axis_of_positions(node))

    def _product(self, a: _AngleAxes, b: _AngleAxes) -> _AngleAxes:
        if (a.offset is None) == (b.offset is None) or (a.inv_freq is None) == (b.inv_freq is None):
            raise NoMatch
        positions, frequencies = (a, b) if b.offset is None else (b, a)
        if positions.position_axis == frequencies.frequency_axis:
            raise NoMatch
        return positions._replace(inv_freq=frequencies.inv_freq, frequency_axis=frequencies.frequency_axis)

    def _offset(self, m: Matcher, positions) -> Node:
        """Return the offset of `positions` if they are `arange(S) + offset` with an integer offset.

        Otherwise returns `positions`.
        """
        if is_call(positions, *_ADD):
            for steps, offset in m.commuted(positions, *_ADD):
                if is_call(steps, *_ARANGE) and _counts_from_zero(m, steps):
                    if tensor(offset).numel() == 1 and not tensor(offset).is_floating_point():
                        return offset
        return positions

    def angles(self, node, function: str) -> _AngleAxes:
        """Return the positions and frequencies on which `node` depends, and their axes in `node`.

        `node` must be cos(cat(f, f)) or sin(cat(f, f)), where f = positions ⊗ inv_freq, possibly unsqueezed or cast.
        `function` is "cos" or "sin".
        """
        m = Matcher(self.P)
        value = tensor(node)
        if is_call(node, *UNSQUEEZES):
            x, axis = m.arguments(node, UNSQUEEZES, "self", "dim")
            return self.angles(x, function).unsqueezed(value.ndim - 1 - axis % value.ndim)
        if is_call(node, *CASTS):
            return self.angles(_before_cast(m, node, self.out), function)
        # Hugging Face models multiply by an attention scaling factor. The pattern supports the factor 1.
        if is_call(node, *_MUL, "aten.mul.Scalar"):
            x, factor = m.arguments(node, (*_MUL, "aten.mul.Scalar"), "self", "other")
            if m.number(factor) != 1:
                raise NoMatch
            return self.angles(x, function)
        (angles,) = m.arguments(node, [f"aten.{function}.default"], "self")
        parts, axis = m.arguments(angles, _CAT, "tensors", "dim")
        if len(parts) != 2 or parts[0] is not parts[1] or tensor(angles).dtype != torch.float32:
            raise NoMatch
        axes = self.axes(parts[0])
        if axes.inv_freq is None or not is_last_axis(axis, angles) or axes.frequency_axis != 0:
            raise NoMatch
        return axes


def _axis_of_positions(node: Node) -> int:
    """Return the axis of `node` whose extent is not 1, counted from the right; the last axis if there is none.

    Raises NoMatch unless `node` has integers and at most one such axis.
    """
    axes = [axis for axis, extent in enumerate(reversed(extents(node))) if extent != 1]
    if tensor(node).dtype not in (torch.int32, torch.int64) or tensor(node).ndim == 0 or len(axes) > 1:
        raise NoMatch
    return axes[0] if axes else 0


def _before_cast(m: Matcher, node: Node, precision: torch.dtype) -> Node:
    """Return the operand of a cast that loses nothing which the float dtype `precision` would keep.

    Such a cast is one to a float dtype that holds the numbers of `precision` or of the operand, or one from integers to
    int32 or int64. Raises NoMatch for any other cast.
    """
    operand, _ = m.arguments(node, CASTS, "self", "dtype")
    source, target = tensor(operand).dtype, tensor(node).dtype
    if target.is_floating_point:
        is_kept = can_represent(target, precision) or source.is_floating_point and can_represent(target, source)
    else:
        is_kept = target in (torch.int32, torch.int64) and not source.is_floating_point
    if not is_kept:
        raise NoMatch
    return operand


def _counts_from_zero(m: Matcher, node: Node) -> bool:
    if tensor(node).dtype not in (torch.int32, torch.int64, torch.float32):
        return False
    if is_call(node, "aten.arange.default"):
        return True
    if is_call(node, "aten.arange.start"):
        start, _, _ = m.arguments(node, ["aten.arange.start"], "start", "end", "dtype")
        return start == 0
    start, _, step, _ = m.arguments(node, ["aten.arange.start_step"], "start", "end", "step", "dtype")
    return start == 0 and step == 1


class _Rotation(NamedTuple):
    """A matched rotation of `x`. `order` are the axes of `x` in the order in which `RopeNode` expects them.

    `angles` describes the angles.
    """

    x: Node
    order: list[int]
    angles: _AngleAxes


def _rotation(m: Matcher, node) -> _Rotation:
    """Match x * cos + rotate_half(x) * sin."""
    for cos_term, sin_term in m.commuted(node, *_ADD):
        operands = _rotation_terms(m, cos_term, sin_term)
        if operands is not None:
            break
    else:
        raise NoMatch
    x, cos, sin = operands
    follower = _Follower(m.P, tensor(node).dtype)
    angles = follower.angles(cos, "cos")
    if angles != follower.angles(sin, "sin"):
        raise NoMatch
    # The angles broadcast against x. Along the axis of the positions, both must have the same extent.
    from_right = angles.position_axis
    if tensor(x).ndim not in (3, 4) or extents(node) != extents(x) or not 1 <= from_right < tensor(x).ndim:
        raise NoMatch
    axis = tensor(x).ndim - 1 - from_right
    if extents(cos)[-1 - from_right] != extents(x)[axis] or tensor(cos).ndim > tensor(x).ndim:
        raise NoMatch
    if extents(x)[-1] != 2 * tensor(angles.inv_freq).numel() or tensor(node).dtype != tensor(x).dtype:
        raise NoMatch
    return _Rotation(x, _order_for_rope(x, axis, angles.consecutive), angles)


def _order_for_rope(x: Node, axis: int, consecutive: bool) -> list[int]:
    """Return the axes of `x` in the order in which `RopeNode` expects them. `axis` is the axis of the positions."""
    order = list(range(tensor(x).ndim))
    if consecutive:
        order[axis], order[-2] = order[-2], order[axis]
        return order
    # `RopeNode` takes one offset for each index of the first axis, and counts on from it along axis -2.
    single = [a for a in order[:-1] if a != axis and extents(x)[a] == 1]
    if not single:
        raise NoMatch
    return [axis, *(a for a in order[:-1] if a not in (axis, single[0])), single[0], order[-1]]


def _rope(P: Lowering, node: Node) -> Match:
    m = Matcher(P)
    return _finish(m, node, _rotation(m, node))


def _partial_rope(P: Lowering, node: Node) -> Match:
    """Match cat(rotated x[..., :dims], x[..., dims:])."""
    m = Matcher(P)
    parts, axis = m.arguments(node, _CAT, "tensors", "dim")
    if len(parts) != 2 or not is_last_axis(axis, node):
        raise NoMatch
    rotation = _rotation(m, parts[0])
    x = m.arguments(rotation.x, _SLICE, *_SLICE_ARGUMENTS)[0]
    dims = tensor(rotation.x).shape[-1]
    if not _is_slice(m, rotation.x, x, 0, dims) or not _is_slice(m, parts[1], x, dims, None):
        raise NoMatch
    if tensor(node).dtype != tensor(x).dtype or extents(node) != extents(x):
        raise NoMatch
    return _finish(m, node, rotation._replace(x=x))


def _finish(m: Matcher, node: Node, rotation: _Rotation) -> Match:
    """Return the match of a rotation, whose result is `node`."""
    x, order, angles = rotation

    def lower(P: Lowering, last):
        frequencies, count = P.value(angles.inv_freq), tensor(angles.inv_freq).numel()
        # MLX divides the positions by `freqs`.
        freqs = P.constant(
            f"{frequencies.name}.reciprocal",
            lambda: frequencies.data().float().reciprocal().reshape(-1),
            (count,),
            torch.float32,
        )
        start = P.emit(ir.ReshapeNode, x=P.value(angles.offset), shape=[] if angles.consecutive else [-1])
        start = P.cast(start, torch.int32)
        moved = P.emit(ir.TransposeNode, x=P.value(x), perm=order)
        rotated = P.emit(ir.RopeNode, x=moved, dims=2 * count, offset=start, freqs=freqs)
        return P.emit(ir.TransposeNode, x=rotated, perm=[order.index(a) for a in range(len(order))])

    return m.finish(node, lower, reads=(angles.offset,))


def _rotation_terms(m: Matcher, cos_term, sin_term):
    """Return (x, cos, sin) if the terms are x * cos and rotate_half(x) * sin, else None. Adds their nodes to `m`."""
    if not (is_call(cos_term, *_MUL) and is_call(sin_term, *_MUL)):
        return None
    for rotated, sin in m.commuted(sin_term, *_MUL):
        try:
            half = _rotated_half(m, rotated)
        except NoMatch:
            continue
        for x, cos in m.commuted(cos_term, *_MUL):
            if x is half:
                return x, cos, sin
    return None


def _rotated_half(m: Matcher, node) -> Node:
    """Match cat(-x[half:], x[:half]). Returns x."""
    parts, axis = m.arguments(node, _CAT, "tensors", "dim")
    if len(parts) != 2 or not is_last_axis(axis, node):
        raise NoMatch
    (upper,) = m.arguments(parts[0], _NEG, "self")
    x = m.arguments(upper, _SLICE, *_SLICE_ARGUMENTS)[0]
    width = tensor(x).shape[-1]
    if not isinstance(width, int) or width % 2:
        raise NoMatch
    if not _is_slice(m, upper, x, width // 2, None) or not _is_slice(m, parts[1], x, 0, width // 2):
        raise NoMatch
    return x


_SLICE_ARGUMENTS = ("self", "dim", "start", "end", "step")


def _is_slice(m: Matcher, node, x: Node, start: int, stop: int | None) -> bool:
    """Whether `node` is x[..., start:stop]. Adds `node` to the match; raises NoMatch if `node` is no slice."""
    source, axis, begin, end, step = m.arguments(node, _SLICE, *_SLICE_ARGUMENTS)
    if source is not x or not is_last_axis(axis, x) or step != 1 or (begin or 0) != start:
        return False
    width = tensor(x).shape[-1]
    end = width if end is None else end
    return isinstance(end, int) and isinstance(width, int) and min(end, width) == (width if stop is None else stop)


REGISTRY.pattern(attempt(_partial_rope))
REGISTRY.pattern(attempt(_rope))
