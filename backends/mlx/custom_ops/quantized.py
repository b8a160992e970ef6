"""Torch operators on packed weights and on experts: schema, eager kernel, fake kernel.

The module `packing` explains the arguments `w`, `scales`, `biases`, `group_size`, `bits` and `mode`. Importing this
module defines the operators in the operator library `mlx`.
"""

from __future__ import annotations

import torch

from .library import define, differentiate
from .packing import check, dequantize

_PACKED = "Tensor w, Tensor scales, Tensor? biases, int group_size, int bits, str mode"


# One matrix ----------------------------------------------------------------------------


_ROWS_AT_A_TIME = 8192  # how many rows of a matrix eager mode dequantizes at a time


def _quantized_matmul(x, w, scales, biases, *format):
    x_float, parts = x.float(), []
    for first in range(0, w.shape[0], _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        matrix = dequantize(w[rows], scales[rows], None if biases is None else biases[rows], *format)
        parts.append(x_float @ matrix.mT)
    return torch.cat(parts, -1).to(x.dtype)


def _quantized_matmul_fake(x, w, scales, biases, group_size, bits, mode):
    check(w, scales, biases, group_size, bits, mode)
    torch._check(x.shape[-1] == w.shape[-1] * 32 // bits, lambda: "mlx::quantized_matmul: x and w differ in K")
    return x.new_empty((*x.shape[:-1], w.shape[0]))


# The product of x [..., K] and the transpose of the packed matrix [N, K]. The result is [..., N] in the dtype of x.
# Eager mode computes in float32.
quantized_matmul = define(f"quantized_matmul(Tensor x, {_PACKED}) -> Tensor", _quantized_matmul, _quantized_matmul_fake)


def _quantized_matmul_backward(grad, w, scales, biases, *format):
    y, grad = 0, grad.float()
    for first in range(0, w.shape[0], _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        matrix = dequantize(w[rows], scales[rows], None if biases is None else biases[rows], *format)
        y = y + grad[..., rows] @ matrix
    return y


def _quantized_matmul_backward_fake(grad, w, scales, biases, group_size, bits, mode):
    return grad.new_empty((*grad.shape[:-1], w.shape[1] * 32 // bits))


# The gradient of `x` in `quantized_matmul`: the product of grad [..., N] and the packed matrix [N, K], in the dtype of
# grad.
quantized_matmul_backward = define(
    f"quantized_matmul_backward(Tensor grad, {_PACKED}) -> Tensor",
    lambda grad, *packed: _quantized_matmul_backward(grad, *packed).to(grad.dtype),
    _quantized_matmul_backward_fake,
)


def _save_packed(context, inputs):
    _, *operands, context.group_size, context.bits, context.mode = inputs
    context.save_for_backward(*operands)


def _quantized_matmul_gradients(context, grad):
    format = context.group_size, context.bits, context.mode
    return quantized_matmul_backward(grad, *context.saved_tensors, *format), *[None] * 6


differentiate(quantized_matmul, _quantized_matmul_gradients, _save_packed)


def _quantized_embedding(indices, w, scales, biases, group_size, bits, mode, dtype):
    biases = None if biases is None else biases[indices]
    return dequantize(w[indices], scales[indices], biases, group_size, bits, mode).to(dtype)


def _quantized_embedding_fake(indices, w, scales, biases, group_size, bits, mode, dtype):
    check(w, scales, biases, group_size, bits, mode)
    return w.new_empty((*indices.shape, w.shape[1] * 32 // bits), dtype=dtype)


# The matrix rows `indices` [...] of the packed matrix [N, K], dequantized. The result is [..., K] of `dtype`.
quantized_embedding = define(
    f"quantized_embedding(Tensor indices, {_PACKED}, ScalarType dtype) -> Tensor",
    _quantized_embedding,
    _quantized_embedding_fake,
)


# Matrices of experts -------------------------------------------------------------------


def _matmul_per_expert(x, index, columns, matrix_of):
    """Return y, where y[i] = x[i] @ transpose(matrix_of(index[i])) for each i of the broadcast batch dimensions."""
    batch = torch.broadcast_shapes(x.shape[:-2], index.shape)
    left = x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
    index = index.expand(batch).reshape(-1)
    y = x.new_empty(left.shape[0], x.shape[-2], columns)
    for expert in index.unique().tolist():
        selected = index == expert
        y[selected] = (left[selected].float() @ matrix_of(expert).float().mT).to(x.dtype)
    return y.reshape(*batch, *y.shape[1:])


def _gathered_matmul(x, weight, index):
    return _matmul_per_expert(x, index, weight.shape[1], lambda expert: weight[expert])


def _gathered_fake(x, weight, index, *_):
    batch = torch.broadcast_shapes(x.shape[:-2], index.shape)
    return x.new_empty((*batch, x.shape[-2], weight.shape[1]))


# x [..., M, K], weight [E, N, K], index [...] in [0, E) → [..., M, N]: y[i] = x[i] @ transpose(weight[index[i]]). The
# batch dimensions of x and index broadcast. The operator `gather_mm` of ExecuTorch's own MLX delegate differs: there
# the matrices of the right operand are [K, N], and indices can select the matrices of both operands.
gathered_matmul = define(
    "gathered_matmul(Tensor x, Tensor weight, Tensor index) -> Tensor", _gathered_matmul, _gathered_fake
)


def _gathered_quantized_matmul(x, index, w, scales, biases, group_size, bits, mode):
    def matrix_of(expert):
        bias = None if biases is None else biases[expert]
        return dequantize(w[expert], scales[expert], bias, group_size, bits, mode)

    return _matmul_per_expert(x, index, w.shape[1], matrix_of)


def _gathered_quantized_fake(x, index, w, scales, biases, group_size, bits, mode):
    check(w, scales, biases, group_size, bits, mode)
    return _gathered_fake(x, w, index)


# Like `gathered_matmul`, with packed matrices: w [E, N, K * bits / 32].
gathered_quantized_matmul = define(
    f"gathered_quantized_matmul(Tensor x, Tensor index, {_PACKED}) -> Tensor",
    _gathered_quantized_matmul,
    _gathered_quantized_fake,
)
