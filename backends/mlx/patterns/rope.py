"""Rotary position embedding in the Hugging Face spelling.

    x * cos + cat(-x[half:], x[:half]) * sin,   cos, sin of positions ⊗ inv_freq, twice

with positions that run on from an offset: `arange(S) + offset`. Any other positions stay
spelled out. Only the first numbers of each row may be rotated.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..builder.patterns import CASTS, UNSQUEEZES, Match, Matcher, NoMatch, attempt, is_call
from ..builder.registry import REGISTRY
from ..serialization import ir

_SLICE = ("aten.slice_copy.Tensor", "aten.slice.Tensor")
_ADD = ("aten.add.Tensor",)
_MUL = ("aten.mul.Tensor",)


def _peel(node, *targets: str):
    """Step through calls that only reshape, repeat or cast; they may have other readers."""
    while is_call(node, *targets):
        node = node.args[0]
    return node


def _angles(m: Matcher, node, function: str):
    """`positions, inv_freq` if node is function(positions ⊗ inv_freq), scaled by one."""
    node = _peel(node, *UNSQUEEZES, *CASTS)
    if is_call(node, *_MUL, "aten.mul.Scalar"):
        if m.number(node.args[1]) != 1:
            raise NoMatch
        node = _peel(node.args[0], *CASTS)
    if not is_call(node, f"aten.{function}.default"):
        raise NoMatch
    both = node.args[0]
    if not is_call(both, "aten.cat.default") or len(set(both.args[0])) != 1:
        raise NoMatch
    product = _peel(both.args[0][0], *CASTS)
    if not is_call(product, *_MUL):
        raise NoMatch
    positions, inv_freq = (_peel(a, *UNSQUEEZES, *CASTS) for a in product.args)
    return positions, inv_freq


def _offset(positions):
    """The offset of `arange(S) + offset`."""
    positions = _peel(positions, *UNSQUEEZES, *CASTS)
    if not is_call(positions, *_ADD):
        raise NoMatch
    for steps, offset in (positions.args, positions.args[::-1]):
        if is_call(steps, "aten.arange.start_step", "aten.arange.default", "aten.arange.start"):
            if _counts_from_zero(steps) and offset.meta["val"].numel() == 1:
                return offset
    raise NoMatch


def _counts_from_zero(node: Node) -> bool:
    if is_call(node, "aten.arange.default"):
        return True
    start, _, *step = node.args
    return start == 0 and step in ([], [1])


def _rotation(m: Matcher, node):
    """(x, inv_freq, offset) of a rotated `x`."""
    for straight, crossed in m.commuted(node, *_ADD):
        found = _halves(m, straight, crossed)
        if found is not None:
            break
    else:
        raise NoMatch
    x, cos, sin = found
    angles = _angles(m, cos, "cos")
    if angles != _angles(m, sin, "sin"):
        raise NoMatch
    positions, inv_freq = angles
    offset = _offset(positions)
    if x.meta["val"].ndim != 4 or x.meta["val"].shape[-1] != 2 * inv_freq.meta["val"].numel():
        raise NoMatch
    if not m.P.is_constant(inv_freq):
        raise NoMatch
    return x, inv_freq, offset


def _rope(P, node: Node) -> Match:
    m = Matcher(P)
    return m.finish(node, _rotate(*_rotation(m, node)))


def _partial_rope(P, node: Node) -> Match:
    """Of the first numbers of each row only; the rest goes past."""
    m = Matcher(P)
    parts, *axis = m.call(node, "aten.cat.default").args
    last = node.meta["val"].ndim - 1
    if len(parts) != 2 or axis not in ([-1], [last]):
        raise NoMatch
    rotated, inv_freq, offset = _rotation(m, parts[0])
    x = m.call(rotated, *_SLICE).args[0]
    dims, width = rotated.meta["val"].shape[-1], x.meta["val"].shape[-1]
    if m.call(parts[1], *_SLICE).args[0] is not x or x.meta["val"].ndim != 4:
        raise NoMatch
    for part, start, stop in ((rotated, 0, dims), (parts[1], dims, width)):
        _, part_axis, begin, end, *step = part.args
        if part_axis not in (-1, last) or (begin, min(end, width), step) != (start, stop, []):
            raise NoMatch
    return m.finish(node, _rotate(x, inv_freq, offset))


def _rotate(x: Node, inv_freq: Node, offset: Node):
    def lower(P, last):
        frequencies, count = P.value(inv_freq), inv_freq.meta["val"].numel()
        # MLX divides by its frequencies.
        freqs = P.constant(
            f"{frequencies.name}.reciprocal",
            lambda: frequencies.data().float().reciprocal().reshape(-1),
            (count,),
            torch.float32,
        )
        start = P.cast(P.emit(ir.ReshapeNode, x=P.value(offset), shape=[]), torch.int32)
        return P.emit(ir.RopeNode, x=P.value(x), dims=2 * count, offset=start, freqs=freqs)

    return lower


def _halves(m: Matcher, straight, crossed):
    """(x, cos, sin) of x * cos and rotate_half(x) * sin."""
    if not (is_call(straight, *_MUL) and is_call(crossed, *_MUL)):
        return None
    for rotated, sin in (crossed.args, crossed.args[::-1]):
        if not is_call(rotated, "aten.cat.default"):
            continue
        parts = rotated.args[0]
        if len(parts) != 2 or not is_call(parts[0], "aten.neg.default"):
            continue
        upper, lower = parts[0].args[0], parts[1]
        if not (is_call(upper, *_SLICE) and is_call(lower, *_SLICE)):
            continue
        x = upper.args[0]
        half = x.meta["val"].shape[-1] // 2
        last = (x.meta["val"].ndim - 1, -1)
        if lower.args[0] is not x or upper.args[1] not in last or lower.args[1] not in last:
            continue
        if upper.args[2] != half or tuple(lower.args[2:4]) != (0, half) or x not in straight.args:
            continue
        cos = straight.args[1] if straight.args[0] is x else straight.args[0]
        for swallowed in (straight, crossed, rotated, parts[0], upper, lower):
            m.call(swallowed, str(getattr(swallowed.target, "_op", swallowed.target)))
        return x, cos, sin
    return None


REGISTRY.pattern(attempt(_partial_rope))
REGISTRY.pattern(attempt(_rope))
