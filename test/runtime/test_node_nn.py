"""linalg, conv, norm, attention and quant: numerics against torch in float32."""

import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Graph, ir
from rows import FLOATS, Row, cases, check, random

F32 = FLOATS[:1]


def wide(op):
    """torch in float32, rounded to the dtype of the run at the end."""

    def apply(**inputs):
        dtype = next(iter(inputs.values())).dtype
        wides = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
        return op(**wides).to(dtype)

    return apply


LINALG = [
    Row(
        ir.AddmmNode,
        {"mat1": random(3, 8), "mat2": random(8, 5), "bias": random(5)},
        wide(lambda mat1, mat2, bias: 0.5 * mat1 @ mat2 + 2 * bias),
        {"alpha": 0.5, "beta": 2.0},
        tolerance=4,
    ),
    Row(
        ir.AddmmNode,
        {"mat1": random(2, 3, 8), "mat2": random(2, 8, 5)},
        wide(lambda mat1, mat2: 3 * mat1 @ mat2),
        {"alpha": 3.0},
        tolerance=4,
        note="batch",
    ),
    Row(
        ir.GatherMmNode,
        {
            "a": random(4, 1, 8),
            "b": random(3, 8, 5),
            "lhs_indices": torch.tensor([0, 3], dtype=torch.int32),
            "rhs_indices": torch.tensor([2, 1], dtype=torch.int32),
        },
        wide(lambda a, b, lhs_indices, rhs_indices: a[lhs_indices.long()] @ b[rhs_indices.long()]),
        tolerance=4,
    ),
]


def channels_last(op, **kw):
    def apply(x, w):
        return op(x.movedim(-1, 1), w.movedim(-1, 1), **kw).movedim(1, -1)

    return apply


def transposed(op, groups=1, **kw):
    """w is [out, ..., in / groups]; torch wants [in, out / groups, ...]."""

    def apply(x, w):
        parts = [p.movedim(-1, 0).movedim(1, 1) for p in w.chunk(groups, 0)]
        return op(x.movedim(-1, 1), torch.cat(parts, 0), groups=groups, **kw).movedim(1, -1)

    return apply


CONV = [
    Row(
        ir.Conv1DNode,
        {"x": random(2, 9, 4), "w": random(6, 3, 2)},
        wide(channels_last(F.conv1d, stride=2, padding=1, dilation=2, groups=2)),
        {"stride": 2, "padding": 1, "dilation": 2, "groups": 2},
        tolerance=4,
    ),
    Row(
        ir.Conv2DNode,
        {"x": random(1, 7, 8, 3), "w": random(4, 3, 2, 3)},
        wide(channels_last(F.conv2d, stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
        {"stride_h": 2, "padding_h": 1, "dilation_w": 2},
        tolerance=4,
    ),
    Row(
        ir.Conv3DNode,
        {"x": random(1, 5, 6, 7, 2), "w": random(3, 2, 3, 2, 2)},
        wide(channels_last(F.conv3d, stride=(1, 2, 1), padding=(0, 1, 1))),
        {"stride_h": 2, "padding_h": 1, "padding_w": 1},
        tolerance=4,
    ),
    Row(
        ir.ConvTranspose1DNode,
        {"x": random(2, 5, 4), "w": random(6, 3, 4)},
        wide(transposed(F.conv_transpose1d, stride=2, padding=1, output_padding=1, dilation=2)),
        {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2},
        tolerance=4,
    ),
    Row(
        ir.ConvTranspose1DNode,
        {"x": random(2, 5, 4), "w": random(6, 3, 2)},
        wide(transposed(F.conv_transpose1d, groups=2, stride=3)),
        {"stride": 3, "groups": 2},
        tolerance=4,
        note="groups",
    ),
    Row(
        ir.ConvTranspose2DNode,
        {"x": random(1, 4, 5, 3), "w": random(4, 3, 2, 3)},
        wide(transposed(F.conv_transpose2d, stride=(2, 1), padding=(1, 0), output_padding=(1, 0))),
        {"stride_h": 2, "padding_h": 1, "output_padding_h": 1},
        tolerance=4,
    ),
    Row(
        ir.ConvTranspose3DNode,
        {"x": random(1, 3, 4, 3, 2), "w": random(3, 2, 3, 2, 2)},
        wide(transposed(F.conv_transpose3d, stride=(2, 1, 1), padding=(0, 1, 0))),
        {"stride_d": 2, "padding_h": 1},
        tolerance=4,
    ),
]

NORM = [
    Row(
        ir.RMSNormNode,
        {"x": random(3, 8), "weight": random(8)},
        wide(lambda x, weight: F.rms_norm(x, (8,), weight, 1e-5)),
        {"eps": 1e-5},
    ),
    Row(ir.RMSNormNode, {"x": random(3, 8)}, wide(lambda x: F.rms_norm(x, (8,), None, 1e-5)), {"eps": 1e-5}, note="plain"),
    Row(
        ir.LayerNormNode,
        {"x": random(3, 8), "weight": random(8), "bias": random(8) + 1},
        wide(lambda x, weight, bias: F.layer_norm(x, (8,), weight, bias, 1e-5)),
        {"eps": 1e-5},
    ),
    *(
        Row(
            ir.SoftmaxNode,
            {"x": random(3, 8)},
            wide(lambda x, d=d: x.softmax(d)),
            {"axis": d, "precise": precise},
            note=str(precise),
        )
        for d, precise in ((1, True), (0, False))
    ),
]


def rotated(x, offset, dims=4, base=10000.0, scale=1.0):
    """Rotary embedding of halves, positions from `offset` on. x: [B, H, S, D]."""
    half = dims // 2
    position = (torch.arange(x.shape[-2]) + offset) * scale
    angle = position[:, None] * base ** (-torch.arange(half) / half)
    a, b, rest = x[..., :half], x[..., half:dims], x[..., dims:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


def attend(q, k, v, mask=None, causal=False):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    if causal:
        s, t = q.shape[-2], k.shape[-2]
        mask = torch.ones(s, t, dtype=torch.bool).tril(t - s)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.25)


QKV = {"q": random(1, 4, 3, 16), "k": random(1, 2, 5, 16), "v": random(1, 2, 5, 16)}

ATTENTION = [
    Row(ir.SdpaNode, QKV, wide(attend), {"scale": 0.25}),
    Row(ir.SdpaNode, QKV, wide(lambda **x: attend(**x, causal=True)), {"scale": 0.25, "causal": True}, note="causal"),
    Row(ir.SdpaNode, {**QKV, "mask": random(3, 5)}, wide(attend), {"scale": 0.25}, note="additive"),
    Row(ir.SdpaNode, {**QKV, "mask": random(1, 1, 3, 5) > -1}, wide(attend), {"scale": 0.25}, note="bool"),
]


def quantized(mode="affine", rows=6, columns=64, group_size=32, bits=4, batch=()):
    w = random(*batch, rows, columns).numpy()
    parts = [torch.from_numpy(np.array(p)) for p in mx.quantize(mx.array(w), group_size, bits, mode)]
    return dict(zip(("w", "scales", "biases"), parts))


def dequantized(w, scales, biases=None, mode="affine", group_size=32, bits=4, **_):
    parts = [mx.array(p.numpy()) for p in (w, scales, biases) if p is not None]
    y = mx.dequantize(*parts[:2], parts[2] if biases is not None else None, group_size, bits, mode)
    return torch.from_numpy(np.array(y.astype(mx.float32)))


Q = {"group_size": 32, "bits": 4, "mode": "affine"}
MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}


def qmm(mode, tolerance=4.0, **kw):
    x = random(3, 64)
    note = f"{mode['mode']}{mode['bits']}"
    parts = quantized(**mode)
    yield Row(
        ir.QuantizedMatmulNode,
        {"x": x, **parts},
        wide(lambda x, **q: x @ dequantized(**{**q, **mode}).T),
        mode,
        tolerance=tolerance,
        note=note,
    )
    yield Row(
        ir.DequantizeNode,
        parts,
        lambda **q: dequantized(**{**q, **mode}),
        {**mode, "dtype": 6},
        dtypes=F32,
        note=note,
    )


QUANT = [
    *qmm(Q),
    *qmm({**Q, "bits": 8, "group_size": 64}),
    *qmm(MXFP8),
    *qmm(NVFP4),
    Row(
        ir.GatherQmmNode,
        {
            "x": random(2, 1, 64),
            **quantized(batch=(3,)),
            "rhs_indices": torch.tensor([2, 0], dtype=torch.int32),
            "lhs_indices": torch.tensor([1, 0], dtype=torch.int32),
        },
        wide(
            lambda x, w, scales, biases, rhs_indices, lhs_indices: x[lhs_indices.long()]
            @ dequantized(w, scales, biases)[rhs_indices.long()].mT
        ),
        Q,
        tolerance=4,
    ),
]

ROWS = LINALG + CONV + NORM + ATTENTION + QUANT
COVERED = {ir.RopeNode}


@pytest.mark.parametrize("row, dtype", cases(ROWS))
def test_row(row, dtype):
    check(row, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("how", ["value", "tensor", "freqs"])
def test_rope(how, dtype):
    g = Graph()
    x = g.input((1, 2, 3, 6), dtype)
    args = [random(1, 2, 3, 6).to(dtype)]
    fields = {"dims": 4, "base": 10000.0}
    if how == "tensor":
        fields["offset"] = ir.VidOrTid(tid=g.input((), torch.int32))
        args.append(torch.tensor(7, dtype=torch.int32))
    else:
        position, value = g.input((), torch.int32), g.value()
        g.emit(ir.ItemIntNode(x=position, out=value))
        fields["offset"] = ir.VidOrTid(vid=value, is_vid=True)
        args.append(torch.tensor(7, dtype=torch.int32))
    if how == "freqs":
        fields["freqs"] = g.constant(10000.0 ** (torch.arange(2) / 2))
    g.emit(ir.RopeNode(x=x, out=g.output((1, 2, 3, 6), dtype), **fields))
    (result,) = g.run(*args)
    want = rotated(args[0].float(), 7)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(result.float(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "node, shapes, fields, said",
    [
        (ir.Conv2DNode, {"x": (1, 4, 4, 3), "w": (2, 3, 3, 3)}, {"stride_h": 0}, "axis 0 has stride 0"),
        (ir.Conv2DNode, {"x": (1, 2, 2, 3), "w": (2, 3, 3, 3)}, {}, "axis 0 of the result would have 0"),
        (ir.Conv1DNode, {"x": (1, 4, 4), "w": (2, 3, 3)}, {"groups": 2}, "does not make 2 groups"),
        (ir.RMSNormNode, {"x": (2, 4), "weight": (3,)}, {"eps": 1e-5}, "weight is float32[3], shape [4] was expected"),
        (ir.SdpaNode, {"q": (2, 4), "k": (2, 4), "v": (2, 4)}, {"scale": 1.0}, "4 axes were expected"),
        (ir.SoftmaxNode, {"x": (2, 4)}, {"axis": 2}, "axis 2 is outside [-2, 2)"),
        (ir.AddmmNode, {"mat1": (2, 4), "mat2": (3, 4)}, {}, "%0 float32[2,4]"),
    ],
)
def test_wrong_operands_are_errors(node, shapes, fields, said, capfd):
    g = Graph()
    inputs = {name: g.input(shape) for name, shape in shapes.items()}
    g.emit(node(**inputs, out=g.output((1,)), **fields))
    with pytest.raises(RuntimeError):
        g.run(*(torch.zeros(shape) for shape in shapes.values()))
    assert said in capfd.readouterr().err
