"""Torch operators over weights in MLX's packings, and over experts: schema, eager, fake.

What `w`, `scales`, `biases`, `group_size`, `bits` and `mode` are: see `packing`. Importing this
module defines the operators in the operator library `mlx`.
"""

from __future__ import annotations

import torch

from .custom_ops import define
from .packing import check, dequantize

_PACKED = "Tensor w, Tensor scales, Tensor? biases, int group_size, int bits, str mode"


# One matrix ----------------------------------------------------------------------------


def _quantized_matmul(x, *packed):
    return (x.float() @ dequantize(*packed).mT).to(x.dtype)


def _quantized_matmul_fake(x, w, scales, biases, group_size, bits, mode):
    check(w, scales, biases, group_size, bits, mode)
    torch._check(x.shape[-1] == w.shape[-1] * 32 // bits, lambda: "mlx::quantized_matmul: K differs")
    return x.new_empty((*x.shape[:-1], w.shape[0]))


# x [..., K] @ transpose(w [N, K]) → [..., N] of the dtype of x, computed in float32 in eager mode.
quantized_matmul = define(
    f"quantized_matmul(Tensor x, {_PACKED}) -> Tensor", _quantized_matmul, _quantized_matmul_fake
)


def _quantized_embedding(indices, w, scales, biases, group_size, bits, mode, dtype):
    biases = None if biases is None else biases[indices]
    return dequantize(w[indices], scales[indices], biases, group_size, bits, mode).to(dtype)


def _quantized_embedding_fake(indices, w, scales, biases, group_size, bits, mode, dtype):
    check(w, scales, biases, group_size, bits, mode)
    return w.new_empty((*indices.shape, w.shape[1] * 32 // bits), dtype=dtype)


# Rows `indices` [...] of a matrix [N, K] → [..., K] of `dtype`.
quantized_embedding = define(
    f"quantized_embedding(Tensor indices, {_PACKED}, ScalarType dtype) -> Tensor",
    _quantized_embedding,
    _quantized_embedding_fake,
)


# One matrix out of many ----------------------------------------------------------------


def _each_chosen(x, index, rows, matrix):
    """y[i] = x[i] @ transpose(matrix(index[i])) for all i of the batch axes, broadcast."""
    batch = torch.broadcast_shapes(x.shape[:-2], index.shape)
    left = x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
    index = index.expand(batch).reshape(-1)
    y = x.new_empty(left.shape[0], x.shape[-2], rows)
    for expert in index.unique().tolist():
        chosen = index == expert
        y[chosen] = (left[chosen].float() @ matrix(expert).float().mT).to(x.dtype)
    return y.reshape(*batch, *y.shape[1:])


def _gathered_matmul(x, weight, index):
    return _each_chosen(x, index, weight.shape[1], lambda expert: weight[expert])


def _gathered_fake(x, weight, index, *_):
    batch = torch.broadcast_shapes(x.shape[:-2], index.shape)
    return x.new_empty((*batch, x.shape[-2], weight.shape[1]))


# x [..., M, K], weight [E, N, K], index [...] integers in [0, E): the batch axes of x and index
# broadcast; y[i] = x[i] @ transpose(weight[index[i]]) → [..., M, N].
gathered_matmul = define(
    "gathered_matmul(Tensor x, Tensor weight, Tensor index) -> Tensor",
    _gathered_matmul,
    _gathered_fake,
)


def _gathered_quantized_matmul(x, index, w, scales, biases, group_size, bits, mode):
    def matrix(expert):
        bias = None if biases is None else biases[expert]
        return dequantize(w[expert], scales[expert], bias, group_size, bits, mode)

    return _each_chosen(x, index, w.shape[1], matrix)


def _gathered_quantized_fake(x, index, w, scales, biases, group_size, bits, mode):
    check(w, scales, biases, group_size, bits, mode)
    return _gathered_fake(x, w, index)


# The same with packed matrices, w [E, N, K * bits / 32].
gathered_quantized_matmul = define(
    f"gathered_quantized_matmul(Tensor x, Tensor index, {_PACKED}) -> Tensor",
    _gathered_quantized_matmul,
    _gathered_quantized_fake,
)
