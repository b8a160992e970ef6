"""Lowers `aten.convolution` to `Conv1DNode`, …, `ConvTranspose3DNode`.

torch's layout is channels-first, and MLX's layout is channels-last. The input and the result are therefore transposed
at run time. A constant weight is transposed at export.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import Space
from ..extents import is_empty
from ..serialization import ir

aten = torch.ops.aten

CONV = {1: ir.Conv1DNode, 2: ir.Conv2DNode, 3: ir.Conv3DNode}
TRANSPOSED = {1: ir.ConvTranspose1DNode, 2: ir.ConvTranspose2DNode, 3: ir.ConvTranspose3DNode}

# A convolution node has a field for each axis of the window, such as `stride_h` and `stride_w`. These are the suffixes
# of the field names, by the number of axes.
_SUFFIXES = {1: ("",), 2: ("_h", "_w"), 3: ("_d", "_h", "_w")}


@REGISTRY.lower(aten.convolution.default)
def convolution(P: Lowering, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    rank = input.ndim - 2
    if rank not in CONV:
        raise Unsupported(f"got {rank} spatial axes, expected 1, 2 or 3")
    if not input.dtype.is_floating_point:
        raise Unsupported(f"input: got {input.dtype}, expected a floating-point dtype; cast it first")
    if is_empty(weight.shape):  # the shape of torch's result is not that of a convolution
        raise Unsupported(f"weight: got the shape {list(weight.shape)}, expected a weight with elements")
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    if transposed:
        window["output_padding"] = output_padding
    window = {name: _one_per_axis(values, rank) for name, values in window.items()}
    cropped = [0] * rank
    if transposed:
        window["padding"], cropped = _split_padding(window["padding"], window["dilation"], weight.shape[2:])
    fields = {name + suffix: value for name, values in window.items() for suffix, value in zip(_SUFFIXES[rank], values)}
    op = (TRANSPOSED if transposed else CONV)[rank]
    x = P.emit(ir.TransposeNode, x=input, perm=[0, *range(2, rank + 2), 1])
    w = _channels_last(P, weight, transposed, groups)
    if rank == 3 and groups > 1:
        out = _conv_by_group(P, op, x, w, input.shape[1] // groups, groups, fields)
    else:
        out = P.emit(op, x=x, w=w, groups=groups, **fields)
    for axis, count in enumerate(cropped, start=1):
        if count:
            out = P.emit(ir.SliceNode, x=out, axis=axis, start=count, stop=-count)
    if bias is not None:
        out = P.emit(ir.AddNode, a=out, b=bias)
    return P.emit(ir.TransposeNode, x=out, perm=[0, rank + 1, *range(1, rank + 1)])


def _conv_by_group(P: Lowering, op, x, w, channels: int, groups: int, fields: dict):
    """Emit one convolution for each group, because MLX has no grouped convolution over 3 axes."""
    filters = w.shape[0] // groups
    outs = [
        P.emit(
            op,
            x=P.emit(ir.SliceNode, x=x, axis=4, start=i * channels, stop=(i + 1) * channels),
            w=P.emit(ir.SliceNode, x=w, axis=0, start=i * filters, stop=(i + 1) * filters),
            **fields,
        )
        for i in range(groups)
    ]
    return P.emit(ir.ConcatenateNode, tensors=outs, axis=4)


def _split_padding(padding: list[int], dilation: list[int], kernel) -> tuple[list[int], list[int]]:
    """Divide the padding of a transposed convolution.

    Returns the padding for MLX, and the number of elements to remove from each end of the result, for each axis. MLX
    supports a padding of at most dilation * (kernel - 1). It removes the rest from the ends of the input, which is
    wrong if the stride is not 1.
    """
    supported = [min(p, d * (k - 1)) for p, d, k in zip(padding, dilation, kernel)]
    return supported, [p - s for p, s in zip(padding, supported)]


def _one_per_axis(values: list[int], rank: int) -> list[int]:
    return values * rank if len(values) == 1 else values


def _channels_last(P: Lowering, weight, transposed: bool, groups: int):
    """Return the weight in MLX's layout [O, ..., C / groups]. A constant weight is rearranged at export."""
    layout = _transposed_layout if transposed else _layout
    if weight.space != Space.CONSTANT:
        return P.trace(layout, weight, groups)[0]
    shape = layout(torch.empty(weight.shape, device="meta"), groups).shape
    name = f"{weight.name}.channels_last"
    return P.constant(name, lambda: layout(weight.data(), groups).contiguous(), shape, weight.dtype)


def _layout(w: torch.Tensor, groups: int) -> torch.Tensor:
    """Rearrange the weight of a convolution from torch's layout [O, C / groups, ...] to [O, ..., C / groups]."""
    return w.movedim(1, -1)


def _transposed_layout(w: torch.Tensor, groups: int) -> torch.Tensor:
    """Rearrange the weight of a transposed convolution from [C, O / groups, ...] to [O, ..., C / groups]."""
    inputs, outputs, *kernel = w.shape
    grouped = w.reshape(groups, inputs // groups, outputs, *kernel)
    return grouped.movedim(1, -1).reshape(groups * outputs, *kernel, inputs // groups)
