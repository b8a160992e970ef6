"""Products of quantized weights and positive numbers: an error that all weights of a group have in common adds up."""

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.custom_ops.packing import pack
from executorch_mlx.llm.export.packed import MLXExperts, MLXLinear
from executorch_mlx.serialization.read import read_payload
from loaded_method import LoadedMethod
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quant_primitives import MappingType

PT2E = torch.ops.quantized_decomposed
I8, f32, f16, bf16 = torch.int8, torch.float32, torch.float16, torch.bfloat16
# Upper bounds of the norm of the error, relative to the norm of the exact result.
ERROR_BOUNDS = {f32: 1e-5, f16: 1e-3, bf16: 5e-3}
N, K = 8, 1024


class PerRow(torch.nn.Module):
    """A linear layer with the weights that PT2E gives it: integers in [low, high], and a scale for each row."""

    def __init__(self, low, high, zero_point=0, scale=1e-3):
        super().__init__()
        self.register_buffer("q", torch.randint(low, high + 1, (N, K), dtype=I8))
        self.register_buffer("scales", torch.linspace(scale, 2 * scale, N))
        self.register_buffer("zero_points", torch.full((N,), zero_point))
        self.range = low, high

    def forward(self, x):
        arguments = self.q, self.scales, self.zero_points, 0, *self.range, I8
        return torch.nn.functional.linear(x, PT2E.dequantize_per_channel(*arguments, out_dtype=x.dtype))

    def exact(self, x):
        return x @ ((self.q - self.zero_points[:, None]) * self.scales[:, None].double()).T


class Packed(torch.nn.Module):
    """Linear layers and experts in MLX's packing, with biases that need more bits than those of `dtype`."""

    def __init__(self, bits, dtype):
        super().__init__()
        q, zeros = torch.randint(2**bits, (2, N, K)), torch.randint(2**bits, (2, N, 1))
        scales = torch.linspace(0.001, 0.002, N, dtype=dtype).float()[:, None]
        self.matrices = (q - zeros) * scales.double()
        groups = scales.expand(2, N, K // 32).contiguous()
        operands, format = (pack(q.to(torch.uint8), bits), groups, -zeros * groups), {"bits": bits, "group_size": 32}
        self.linear, self.experts = MLXLinear(*(t[0] for t in operands), **format), MLXExperts(*operands, **format)

    def forward(self, x):
        return torch.stack([self.linear(x), self.experts(x[:, None], torch.ones(2, dtype=torch.int64))[:, 0]])

    def exact(self, x):
        return x @ self.matrices.mT


class OfficialExperts(torch.nn.Module):
    """The operator of ExecuTorch's own delegate, with zero points."""

    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("q", torch.randint(-128, 128, (1, N, K), dtype=I8))
        self.register_buffer("zeros", torch.randint(-20, 20, (1, N, 1), dtype=I8).repeat(1, 1, K // 32))
        scales = torch.linspace(0.001, 0.002, N, dtype=dtype)[None, :, None]
        self.register_buffer("scales", scales.repeat(1, 1, K // 32))

    def forward(self, x):
        index = torch.zeros(2, dtype=torch.int32)
        return torch.ops.mlx.gather_qmm(x[:, None], self.q, self.scales, self.zeros, index, bits=8)[:, 0]

    def exact(self, x):
        return x @ ((self.q[0] - self.zeros[0, :, :1].int()) * self.scales[0, :, :1].double()).T


def check(layer, exact, dtype):
    """Check that the lowered layer has no larger error than that of roundings to `dtype`. Returns its IR nodes."""
    x = torch.rand(2, K).to(dtype)
    partitioner = MLXPartitioner()
    program = to_edge_transform_and_lower(torch.export.export(layer, (x,)), partitioner=[partitioner]).to_executorch()
    assert not partitioner.explain().refused, partitioner.explain()
    (actual,) = LoadedMethod(program.buffer).execute([x])
    expected = exact(x.double())
    error = (actual.double() - expected).norm() / expected.norm()
    assert actual.dtype == dtype
    assert error < ERROR_BOUNDS[dtype], f"relative error {error:.2e}"
    (payload,) = program.executorch_program.backend_delegate_data
    (chain,) = read_payload(bytes(payload.data)).instruction_chains
    return [i.op.NAME for i in chain.instructions]


@pytest.mark.parametrize("dtype", ERROR_BOUNDS, ids=str)
@pytest.mark.parametrize(
    "arguments", [(-127, 127), (-128, 127), (-128, 127, 11), (-8, 7, -3), (0, 63, 32), (-127, 127, 0, 1e-7)], ids=str
)
def test_scale_for_each_row(delegate, arguments, dtype):
    layer = PerRow(*arguments)
    nodes = check(layer, layer.exact, dtype)
    assert "QuantizedMatmulNode" in nodes
    if arguments in ((-127, 127), (-128, 127), (0, 63, 32)):
        assert nodes == ["QuantizedMatmulNode"]  # in the dtype of the model


@pytest.mark.parametrize("granularity", (PerGroup(32), PerGroup(64), PerGroup(128), PerAxis(0)), ids=str)
@pytest.mark.parametrize("width", (torch.int2, torch.int3, torch.int4, torch.int5, torch.int6, torch.int8), ids=str)
def test_zero_points_of_torchao(delegate, width, granularity):
    layer = torch.nn.Linear(K, N, bias=False, dtype=bf16)
    quantize_(layer, IntxWeightOnlyConfig(width, granularity, MappingType.ASYMMETRIC))
    check(layer, lambda x: x @ layer.weight.dequantize().double().T, bf16)


@pytest.mark.parametrize("dtype", ERROR_BOUNDS, ids=str)
@pytest.mark.parametrize("scale_dtype", ERROR_BOUNDS, ids=str)
@pytest.mark.parametrize("bits", (4, 8))
def test_packed_weights(delegate, bits, scale_dtype, dtype):
    layer = Packed(bits, scale_dtype)
    check(layer, layer.exact, dtype)


@pytest.mark.parametrize("dtype", (f16, bf16), ids=str)
def test_experts_with_zero_points(delegate, dtype):
    layer = OfficialExperts(dtype)
    check(layer, layer.exact, dtype)
