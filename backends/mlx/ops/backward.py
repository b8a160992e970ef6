"""Gradients for which torch has no decomposition: convolution, pooling, resampling, padding, distances and attention.

Other gradients, such as `silu_backward`, are decomposed by torch when a graph is exported. Each function here is a
torch function with the arguments of its operator. A pooling by averages, a resampling and a padding are linear maps
along each axis, whose matrix is the result of the forward operator for the identity. Their gradient is a product with
each matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._decomp import decomposition_table
from torch.nn import functional as F

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY
from ..builder.slots import TensorSlot
from ..custom_ops.primitives import after
from ..serialization import ir

aten = torch.ops.aten


# -- convolution ----------------------------------------------------------------


def _convolution_backward(
    grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    rank = input.dim() - 2
    stride, padding, dilation = (_one_per_axis(v, rank) for v in (stride, padding, dilation))
    window = stride, padding, dilation
    needs_input, needs_weight, needs_bias = output_mask
    input_grad = weight_grad = bias_grad = None
    if needs_input:
        input_grad = _input_gradient(grad, input, weight, window, transposed, groups)
    if needs_weight:
        pair = (grad, input) if transposed else (input, grad)
        weight_grad = _weight_gradient(*pair, weight.shape[2:], window, groups)
    if needs_bias:
        bias_grad = grad.sum([0, *range(2, grad.dim())])
    return input_grad, weight_grad, bias_grad


def _one_per_axis(values, rank):
    return list(values) * rank if len(values) == 1 else list(values)


def _input_gradient(grad, input, weight, window, transposed, groups):
    """Return the gradient of the input: the convolution of `grad` with the same weight in the other direction."""
    zeros = [0] * (grad.dim() - 2)
    if transposed:
        result = torch.convolution(grad, weight, None, *window, False, zeros, groups)
        for axis, extent in enumerate(input.shape[2:], 2):
            result = result.narrow(axis, 0, extent)
        return result
    # The elements at the end of the input that no window covers.
    rest = [
        extent - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
        for extent, out, k, s, p, d in zip(input.shape[2:], grad.shape[2:], weight.shape[2:], *window)
    ]
    return torch.convolution(grad, weight, None, *window, True, rest, groups)


def _weight_gradient(input, grad, kernel, window, groups):
    """Return the gradient of the weight: a convolution of `input` with `grad`, in which batch and channels are swapped.

    The stride of the convolution is then the distance of the elements of the window, and the other way around.
    """
    batch, channels, *extents = input.shape
    stride, padding, dilation = window
    # [N, groups * C, …] → [C, groups * N, …]: each group of the result reads the channels of its own group.
    x = input.reshape(batch, groups, channels // groups, *extents).movedim((2, 1), (0, 1))
    x = x.reshape(channels // groups, groups * batch, *extents)
    result = torch.convolution(
        x, grad.transpose(0, 1), None, dilation, padding, stride, False, [0] * len(extents), groups
    )
    for axis, size in enumerate(kernel, 2):
        result = result.narrow(axis, 0, size)
    return result.transpose(0, 1)


# -- pooling ----------------------------------------------------------------------


def _max_pool_backward(rank):
    def function(grad, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
        return _scattered(grad, self, indices, rank)

    return function


def _adaptive_max_pool_backward(rank):
    def function(grad, self, indices):
        return _scattered(grad, self, indices, rank)

    return function


def _scattered(grad, self, indices, rank):
    """Add each element of `grad` to the element of the input, of the shape of `self`, that was the maximum."""
    zeros = torch.zeros(self.shape, dtype=grad.dtype, device=grad.device).flatten(-rank)
    return zeros.scatter_add(-1, indices.flatten(-rank), grad.flatten(-rank)).reshape(self.shape)


def _avg_pool_backward(rank):
    def function(grad, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
        stride = stride or kernel_size
        sizes = zip(*(_one_per_axis(v, rank) for v in (kernel_size, stride, padding)), self.shape[-rank:])
        divisor = None if divisor_override is None else 1
        matrices = [
            F.avg_pool2d(_column(grad, n), (k, 1), (s, 1), (p, 0), ceil_mode, count_include_pad, divisor)[0, ..., 0]
            for k, s, p, n in sizes
        ]
        result = _product(grad, matrices)
        return result if divisor_override is None else result / divisor_override

    return function


def _adaptive_avg_pool_backward(rank):
    def function(grad, self):
        extents = zip(self.shape[-rank:], grad.shape[-rank:])
        return _product(grad, [F.adaptive_avg_pool1d(_eye(grad, n), out)[0] for n, out in extents])

    return function


# -- resampling and padding ---------------------------------------------------------


def _upsample_backward(rank, mode):
    """Return the gradient of an upsampling with `align_corners`, of which `mode` is the name in torch."""

    def function(grad, output_size, input_size, align_corners, *scales):
        given = scales or (None,) * rank
        matrices = [
            _resampled(grad, n, out, mode, align_corners, scale)
            for n, out, scale in zip(input_size[-rank:], output_size, given)
        ]
        return _product(grad, matrices)

    return function


def _resampled(grad, n, out, mode, align_corners, scale):
    if mode == "bicubic":
        upsample = decomposition_table[aten.upsample_bicubic2d.default]
        return upsample(_column(grad, n), [out, 1], align_corners, scale, None)[0, ..., 0]
    return aten.upsample_linear1d(_eye(grad, n), [out], align_corners, scale)[0]


def _upsample_nearest_backward(rank, operator):
    def function(grad, output_size, input_size, *scales):
        given = scales or (None,) * rank
        sizes = zip(input_size[-rank:], output_size, given)
        return _product(grad, [operator(_eye(grad, n), [out], scale)[0] for n, out, scale in sizes])

    return function


def _replication_pad_backward(rank):
    def function(grad, self, padding):
        ends = [padding[2 * i : 2 * i + 2] for i in reversed(range(rank))]
        return _product(grad, [F.pad(_eye(grad, n), e, "replicate")[0] for n, e in zip(self.shape[-rank:], ends)])

    return function


def _eye(grad, n):
    """Return the rows of the identity as channels, [1, n, n]."""
    return torch.eye(n, dtype=grad.dtype, device=grad.device).unsqueeze(0)


def _column(grad, n):
    return _eye(grad, n).unsqueeze(-1)


def _product(grad, matrices: Sequence[torch.Tensor]):
    """Multiply `grad` along its last axes by the transposes of `matrices` [n, out], one for each axis."""
    for axis, matrix in zip(range(-len(matrices), 0), matrices):
        grad = (grad.movedim(axis, -1) @ matrix.mT).movedim(-1, axis)
    return grad


# -- distances ------------------------------------------------------------------------


def _cdist_backward(grad, x1, x2, p, cdist):
    """Return the gradient of x1 [..., N, M] from that of its distances [..., N, R] to x2 [..., R, M].

    Where a distance or a difference is 0, the gradient is 0.
    """
    difference, distance = x1.unsqueeze(-2) - x2.unsqueeze(-3), cdist.unsqueeze(-1)
    size, sign = difference.abs(), difference.sign()
    if p == 0:
        slope = torch.zeros_like(difference)
    elif p == math.inf:
        slope = torch.where(size == distance, sign, 0.0)
    else:
        is_zero = (size == 0) | (distance == 0)
        slope = torch.where(is_zero, 0.0, sign * (size / torch.where(is_zero, 1.0, distance)) ** (p - 1))
    return (grad.unsqueeze(-1) * slope).sum(-2)


# -- attention ------------------------------------------------------------------------


def _attention_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    """Return the gradients of q, k and v [B, heads, S, D] of torch's flash attention for CPUs, which has no dropout."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * (query @ key.mT)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = torch.where(allowed, scores, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask if attn_mask.is_floating_point() else torch.where(attn_mask, scores, -math.inf)
    weights = torch.exp(scores - logsumexp.unsqueeze(-1)).to(query.dtype)
    dot = (grad_out * out).sum(-1, keepdim=True)
    grad_scores = scale * weights * (grad_out @ value.mT - dot)
    return grad_scores @ key, grad_scores.mT @ query, weights.mT @ grad_out


GRADIENTS = {
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.adaptive_max_pool2d_backward.default: _adaptive_max_pool_backward(2),
    aten.adaptive_max_pool3d_backward.default: _adaptive_max_pool_backward(3),
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool_backward(2),
    aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool_backward(3),
    aten.upsample_linear1d_backward.default: _upsample_backward(1, "linear"),
    aten.upsample_bilinear2d_backward.default: _upsample_backward(2, "linear"),
    aten.upsample_trilinear3d_backward.default: _upsample_backward(3, "linear"),
    aten.upsample_bicubic2d_backward.default: _upsample_backward(2, "bicubic"),
    aten.upsample_nearest1d_backward.default: _upsample_nearest_backward(1, aten.upsample_nearest1d),
    aten.upsample_nearest3d_backward.default: _upsample_nearest_backward(3, aten.upsample_nearest1d),
    aten._upsample_nearest_exact1d_backward.default: _upsample_nearest_backward(1, aten._upsample_nearest_exact1d),
    aten._upsample_nearest_exact2d_backward.default: _upsample_nearest_backward(2, aten._upsample_nearest_exact1d),
    aten._upsample_nearest_exact3d_backward.default: _upsample_nearest_backward(3, aten._upsample_nearest_exact1d),
    aten.replication_pad1d_backward.default: _replication_pad_backward(1),
    aten.replication_pad2d_backward.default: _replication_pad_backward(2),
    aten.replication_pad3d_backward.default: _replication_pad_backward(3),
    aten._cdist_backward.default: _cdist_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}

for _target, _function in GRADIENTS.items():
    REGISTRY.decompose(_target, _function)


@REGISTRY.lower(after)
def lower_after(P: Lowering, x, other):
    return P.emit(ir.IdCopyNode, x=x, out=TensorSlot(x.dtype, x.shape))  # a result that no later instruction reuses
