"""Linear algebra, convolution, norm, attention and quantization.

Tests the cases of irprograms/node_cases, RoPE, and invalid operands.
"""

import pytest
import torch
from irprograms import Graph, ir
from irprograms.node_case import FLOATS, TOLERANCE, check, parametrize, random
from irprograms.node_cases import nn


@parametrize(nn.CASES)
def test_node_matches_torch(case, dtype):
    check(case, dtype)


def rotated(x, offset, dims=4, base=10000.0, scale=1.0):
    """Return x [B, H, S, D], rotated at the positions from `offset` on. Elements `dims / 2` apart are a pair."""
    half = dims // 2
    position = (torch.arange(x.shape[-2]) + offset) * scale
    angle = position[:, None] * base ** (-torch.arange(half) / half)
    a, b, rest = x[..., :half], x[..., half:dims], x[..., dims:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("variant", ["value offset", "tensor offset", "freqs"])
def test_rope_matches_torch(variant, dtype):
    g = Graph()
    x = g.input((1, 2, 3, 6), dtype)
    args = [random(1, 2, 3, 6).to(dtype)]
    fields = {"dims": 4, "base": 10000.0}
    if variant == "tensor offset":
        fields["offset"] = ir.VidOrTid(tid=g.input((), torch.int32))
        args.append(torch.tensor(7, dtype=torch.int32))
    else:
        fields["offset"] = ir.VidOrTid(vid=g.item(g.input((), torch.int32)), is_vid=True)
        args.append(torch.tensor(7, dtype=torch.int32))
    if variant == "freqs":
        fields["freqs"] = g.constant(10000.0 ** (torch.arange(2) / 2))
    g.emit(ir.RopeNode(x=x, out=g.output((1, 2, 3, 6), dtype), **fields))
    (result,) = g.run(*args)
    expected = rotated(args[0].float(), 7)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "node, shapes, fields, expected",
    [
        (ir.Conv1DNode, {"x": (1, 4, 0), "w": (2, 3, 0)}, {}, (1, 2, 2)),
        (ir.Conv2DNode, {"x": (0, 4, 4, 2), "w": (3, 3, 3, 2)}, {}, (0, 2, 2, 3)),
        (ir.ConvTranspose1DNode, {"x": (1, 4, 0), "w": (2, 3, 0)}, {}, (1, 6, 2)),
        (ir.SdpaNode, {"q": (1, 2, 3, 4), "k": (1, 0, 3, 4), "v": (1, 0, 3, 4)}, {"scale": 1.0}, (1, 2, 3, 4)),
        (ir.SdpaNode, {"q": (1, 2, 3, 4), "k": (1, 2, 0, 4), "v": (1, 2, 0, 4)}, {"scale": 1.0}, (1, 2, 3, 4)),
        (ir.GatherMmNode, {"a": (2, 3, 0), "b": (2, 0, 4)}, {}, (2, 3, 4)),
        (ir.AddmmNode, {"mat1": (3, 0), "mat2": (0, 4)}, {}, (3, 4)),
    ],
)
def test_empty_operands_give_zeros(node, shapes, fields, expected):
    """MLX itself divides by the sizes that are 0 here, such as the number of channels or of key heads."""
    g = Graph()
    inputs = {name: g.input(shape) for name, shape in shapes.items()}
    g.emit(node(**inputs, out=g.output(expected), **fields))
    (result,) = g.run(*(torch.ones(shape) for shape in shapes.values()))
    assert torch.equal(result, torch.zeros(expected))


def test_quantized_product_without_rows_is_empty():
    g = Graph()
    w = g.constant(torch.ones(8, 8, dtype=torch.uint32))
    scales, biases = (g.constant(torch.ones(8, 2)) for _ in range(2))
    g.emit(
        ir.QuantizedMatmulNode(
            x=g.input((0, 64)),
            w=w,
            scales=scales,
            biases=biases,
            out=g.output((0, 8)),
            group_size=32,
            bits=4,
            mode="affine",
            transpose=True,
        )
    )
    assert g.run(torch.ones(0, 64))[0].shape == (0, 8)


@pytest.mark.parametrize(
    "node, shapes, fields, message",
    [
        (ir.Conv2DNode, {"x": (1, 4, 4, 3), "w": (2, 3, 3, 3)}, {"stride_h": 0}, "axis 0: got stride 0"),
        (ir.Conv2DNode, {"x": (1, 2, 2, 3), "w": (2, 3, 3, 3)}, {}, "axis 0: got a result of size 0"),
        (
            ir.Conv1DNode,
            {"x": (1, 4, 4), "w": (2, 3, 3)},
            {"groups": 2},
            "got x with 4 channels and w with shape [2,3,3], expected channels = w.shape[-1] * groups",
        ),
        (
            ir.Conv3DNode,  # 1 result from 2^60 padded elements
            {"x": (1, 1, 1, 1, 1), "w": (1, 2, 2, 2, 1)},
            {
                f"{name}_{axis}": value
                for axis in "dhw"
                for name, value in (("dilation", 2**20 - 1), ("padding", 2**19))
            },
            "expected fewer than 2^31 elements",
        ),
        (ir.RMSNormNode, {"x": (2, 4), "weight": (3,)}, {"eps": 1e-5}, "weight: got float32[3], expected shape [4]"),
        (ir.SdpaNode, {"q": (2, 4), "k": (2, 4), "v": (2, 4)}, {"scale": 1.0}, "expected 4 axes each"),
        (ir.SoftmaxNode, {"x": (2, 4)}, {"axis": 2}, "axis 2 is out of range [-2, 2)"),
        (ir.AddmmNode, {"mat1": (2, 4), "mat2": (3, 4)}, {}, "%0 float32[2,4]"),
    ],
)
def test_invalid_operands_are_errors(node, shapes, fields, message, capfd):
    g = Graph()
    inputs = {name: g.input(shape) for name, shape in shapes.items()}
    g.emit(node(**inputs, out=g.output((1,)), **fields))
    with pytest.raises(RuntimeError):
        g.run(*(torch.zeros(shape) for shape in shapes.values()))
    assert message in capfd.readouterr().err
