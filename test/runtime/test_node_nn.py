"""Linear algebra, convolution, norm, attention and quantization: the cases, RoPE, and invalid operands."""

import pytest
import torch
from irprograms import Graph, ir
from irprograms.node_case import FLOATS, TOLERANCE, check, parametrize, random
from irprograms.node_cases import nn


@parametrize(nn.CASES)
def test_node_matches_torch(case, dtype):
    check(case, dtype)


def rotated(x, offset, dims=4, base=10000.0, scale=1.0):
    """RoPE of x [B, H, S, D] at the positions from `offset` on, with pairs `dims / 2` apart."""
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
    "node, shapes, fields, message",
    [
        (ir.Conv2DNode, {"x": (1, 4, 4, 3), "w": (2, 3, 3, 3)}, {"stride_h": 0}, "axis 0: got stride 0"),
        (ir.Conv2DNode, {"x": (1, 2, 2, 3), "w": (2, 3, 3, 3)}, {}, "axis 0: got a result of size 0"),
        (ir.Conv1DNode, {"x": (1, 4, 4), "w": (2, 3, 3)}, {"groups": 2}, "expected channels = w.shape[-1] * groups"),
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
