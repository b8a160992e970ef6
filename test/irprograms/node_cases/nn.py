"""Test cases of the nodes of linear algebra, convolution, norm, attention and quantization.

torch computes the expected results in float32. For the quantized cases, `mx.dequantize` computes torch's weights.
"""

import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from executorch_mlx.serialization import ir

from ..graph import FLOAT32
from ..node_case import NodeCase, random


def in_float32(op):
    """Return a function that calls `op` with the inputs in float32. Its result has the dtype of the first input."""

    def apply(**inputs):
        dtype = next(iter(inputs.values())).dtype
        return op(**{k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}).to(dtype)

    return apply


LINALG = [
    NodeCase(
        ir.AddmmNode,
        {"mat1": random(3, 8), "mat2": random(8, 5), "bias": random(5)},
        in_float32(lambda mat1, mat2, bias: 0.5 * mat1 @ mat2 + 2 * bias),
        {"alpha": 0.5, "beta": 2.0},
    ),
    NodeCase(
        ir.AddmmNode,
        {"mat1": random(2, 3, 8), "mat2": random(2, 8, 5)},
        in_float32(lambda mat1, mat2: 3 * mat1 @ mat2),
        {"alpha": 3.0},
        note="batch",
    ),
    NodeCase(
        ir.GatherMmNode,
        {
            "a": random(4, 1, 8),
            "b": random(3, 8, 5),
            "lhs_indices": torch.tensor([0, 3], dtype=torch.int32),
            "rhs_indices": torch.tensor([2, 1], dtype=torch.int32),
        },
        in_float32(lambda a, b, lhs_indices, rhs_indices: a[lhs_indices.long()] @ b[rhs_indices.long()]),
    ),
]


def channels_last(op, **kw):
    """Return a function that calls `op`, a convolution of torch, for x and w with the channels in the last axis."""

    def apply(x, w):
        return op(x.movedim(-1, 1), w.movedim(-1, 1), **kw).movedim(1, -1)

    return apply


def transposed_conv(op, groups=1, **kw):
    """Return a function that calls `op`, a transposed convolution of torch, for x and w with the channels last.

    It permutes w from [out, ..., in / groups] to torch's [in, out / groups, ...].
    """

    def apply(x, w):
        parts = [p.movedim(-1, 0) for p in w.chunk(groups, 0)]
        return op(x.movedim(-1, 1), torch.cat(parts, 0), groups=groups, **kw).movedim(1, -1)

    return apply


CONV = [
    NodeCase(
        ir.Conv1DNode,
        {"x": random(2, 9, 4), "w": random(6, 3, 2)},
        in_float32(channels_last(F.conv1d, stride=2, padding=1, dilation=2, groups=2)),
        {"stride": 2, "padding": 1, "dilation": 2, "groups": 2},
    ),
    NodeCase(
        ir.Conv2DNode,
        {"x": random(1, 7, 8, 3), "w": random(4, 3, 2, 3)},
        in_float32(channels_last(F.conv2d, stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
        {"stride_h": 2, "padding_h": 1, "dilation_w": 2},
    ),
    NodeCase(
        ir.Conv3DNode,
        {"x": random(1, 5, 6, 7, 2), "w": random(3, 2, 3, 2, 2)},
        in_float32(channels_last(F.conv3d, stride=(1, 2, 1), padding=(0, 1, 1))),
        {"stride_h": 2, "padding_h": 1, "padding_w": 1},
    ),
    NodeCase(
        ir.ConvTranspose1DNode,
        {"x": random(2, 5, 4), "w": random(6, 3, 4)},
        in_float32(transposed_conv(F.conv_transpose1d, stride=2, padding=1, output_padding=1, dilation=2)),
        {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2},
    ),
    NodeCase(
        ir.ConvTranspose1DNode,
        {"x": random(2, 5, 4), "w": random(6, 3, 2)},
        in_float32(transposed_conv(F.conv_transpose1d, groups=2, stride=3)),
        {"stride": 3, "groups": 2},
        note="groups",
    ),
    NodeCase(
        ir.ConvTranspose1DNode,
        {"x": random(2, 5, 4), "w": random(6, 2, 4)},
        in_float32(transposed_conv(F.conv_transpose1d, stride=3, padding=4, output_padding=1)),
        {"stride": 3, "padding": 4, "output_padding": 1},
        note="padding beyond the reach of the window",
    ),
    NodeCase(
        ir.ConvTranspose2DNode,
        {"x": random(1, 4, 5, 3), "w": random(4, 3, 2, 3)},
        in_float32(transposed_conv(F.conv_transpose2d, stride=(2, 1), padding=(1, 0), output_padding=(1, 0))),
        {"stride_h": 2, "padding_h": 1, "output_padding_h": 1},
    ),
    NodeCase(
        ir.ConvTranspose3DNode,
        {"x": random(1, 3, 4, 3, 2), "w": random(3, 2, 3, 2, 2)},
        in_float32(transposed_conv(F.conv_transpose3d, stride=(2, 1, 1), padding=(0, 1, 0))),
        {"stride_d": 2, "padding_h": 1},
    ),
]

NORM = [
    NodeCase(
        ir.RMSNormNode,
        {"x": random(3, 8), "weight": random(8)},
        in_float32(lambda x, weight: F.rms_norm(x, (8,), weight, 1e-5)),
        {"eps": 1e-5},
    ),
    NodeCase(
        ir.RMSNormNode,
        {"x": random(3, 8)},
        in_float32(lambda x: F.rms_norm(x, (8,), None, 1e-5)),
        {"eps": 1e-5},
        note="no weight",
    ),
    NodeCase(
        ir.LayerNormNode,
        {"x": random(3, 8), "weight": random(8), "bias": random(8) + 1},
        in_float32(lambda x, weight, bias: F.layer_norm(x, (8,), weight, bias, 1e-5)),
        {"eps": 1e-5},
    ),
    *(
        NodeCase(
            ir.SoftmaxNode,
            {"x": random(3, 8)},
            in_float32(lambda x, d=d: x.softmax(d)),
            {"axis": d, "precise": precise},
            note=f"axis {d}, precise" if precise else f"axis {d}",
        )
        for d, precise in ((1, True), (0, False))
    ),
]


def attend(q, k, v, mask=None, causal=False):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    if causal:
        s, t = q.shape[-2], k.shape[-2]
        mask = torch.ones(s, t, dtype=torch.bool).tril(t - s)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.25)


QKV = {"q": random(1, 4, 3, 16), "k": random(1, 2, 5, 16), "v": random(1, 2, 5, 16)}

ATTENTION = [
    NodeCase(ir.SdpaNode, QKV, in_float32(attend), {"scale": 0.25}),
    NodeCase(
        ir.SdpaNode,
        QKV,
        in_float32(lambda **x: attend(**x, causal=True)),
        {"scale": 0.25, "causal": True},
        note="causal",
    ),
    NodeCase(ir.SdpaNode, {**QKV, "mask": random(3, 5)}, in_float32(attend), {"scale": 0.25}, note="additive"),
    NodeCase(ir.SdpaNode, {**QKV, "mask": random(1, 1, 3, 5) > -1}, in_float32(attend), {"scale": 0.25}, note="bool"),
]


def quantized(mode="affine", rows=6, columns=64, group_size=32, bits=4, batch=()):
    w = random(*batch, rows, columns).numpy()
    parts = [torch.from_numpy(np.array(p)) for p in mx.quantize(mx.array(w), group_size, bits, mode)]
    return dict(zip(("w", "scales", "biases"), parts))


def dequantized(w, scales, biases=None, mode="affine", group_size=32, bits=4, **_):
    parts = [mx.array(p.numpy()) for p in (w, scales, biases) if p is not None]
    y = mx.dequantize(*parts[:2], parts[2] if biases is not None else None, group_size, bits, mode)
    return torch.from_numpy(np.array(y.astype(mx.float32)))


AFFINE = {"group_size": 32, "bits": 4, "mode": "affine"}
MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}


def quantized_cases(fields):
    """Yield a matrix product and a dequantization. `fields` are `group_size`, `bits` and `mode` of the nodes."""
    x = random(3, 64)
    note = f"{fields['mode']}{fields['bits']}"
    parts = quantized(**fields)
    yield NodeCase(
        ir.QuantizedMatmulNode,
        {"x": x, **parts},
        in_float32(lambda x, **q: x @ dequantized(**{**q, **fields}).T),
        fields,
        note=note,
    )
    yield NodeCase(
        ir.DequantizeNode,
        parts,
        lambda **q: dequantized(**{**q, **fields}),
        {**fields, "dtype": FLOAT32},
        dtypes=(torch.float32,),
        note=note,
    )


QUANT = [
    *quantized_cases(AFFINE),
    *quantized_cases({**AFFINE, "bits": 8, "group_size": 64}),
    *quantized_cases(MXFP8),
    *quantized_cases(NVFP4),
    NodeCase(
        ir.GatherQmmNode,
        {
            "x": random(2, 1, 64),
            **quantized(batch=(3,)),
            "rhs_indices": torch.tensor([2, 0], dtype=torch.int32),
            "lhs_indices": torch.tensor([1, 0], dtype=torch.int32),
        },
        in_float32(
            lambda x, w, scales, biases, rhs_indices, lhs_indices: (
                x[lhs_indices.long()] @ dequantized(w, scales, biases)[rhs_indices.long()].mT
            )
        ),
        AFFINE,
    ),
]


def gradients(function):
    """Return a function of `grad` and the inputs of `function`: the gradients of those with floating point."""

    def apply(grad, **inputs):
        leaves = {k: v.float().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
        trained = [name for name in leaves if leaves[name].requires_grad and name != "mask"]
        results = torch.autograd.grad(function(**leaves), [leaves[n] for n in trained], grad.float())
        results = [result.to(inputs[name].dtype) for name, result in zip(trained, results)]
        return results if len(results) > 1 else results[0]

    return apply


LOGITS = {"logits": random(2, 3, 9), "targets": torch.tensor([[0, 8, 4], [1, 1, 7]])}
TRAINING = [
    # In half precision, MLX's functions for CPUs compute in half precision, and its kernels for GPUs do not.
    NodeCase(
        ir.SdpaGradientsNode,
        {"grad": random(1, 4, 3, 16), **QKV},
        gradients(attend),
        {"scale": 0.25},
        dtypes=(torch.float32,),
    ),
    NodeCase(
        ir.SdpaGradientsNode,
        {"grad": random(1, 4, 3, 16), **QKV, "mask": random(3, 5)},
        gradients(attend),
        {"scale": 0.25},
        dtypes=(torch.float32,),
        note="mask",
    ),
    NodeCase(
        ir.RMSNormGradientNode,
        {"grad": random(2, 3, 8), "x": random(3, 2, 8).reshape(2, 3, 8)},
        gradients(lambda x: F.rms_norm(x, [8], eps=0.1)),
        {"eps": 0.1},
    ),
    NodeCase(
        ir.SiluGradientNode, {"grad": random(3, 5), "x": random(5, 3).reshape(3, 5)}, gradients(lambda x: F.silu(x))
    ),
    NodeCase(
        ir.CrossEntropyNode,
        LOGITS,
        lambda logits, targets: F.cross_entropy(logits.float().movedim(-1, 1), targets, reduction="none"),
    ),
    NodeCase(
        ir.CrossEntropyGradientNode,
        {"grad": random(2, 3), **LOGITS},
        gradients(lambda logits, targets: F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")),
    ),
]

CASES = LINALG + CONV + NORM + ATTENTION + QUANT + TRAINING
