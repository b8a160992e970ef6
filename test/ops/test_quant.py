"""Quantized weights: torchao's, repacked for MLX, and MLX's own packings."""

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.custom_ops.packing import pack, quantize, unpack
from executorch_mlx.llm.export.packed import MLXEmbedding, MLXExperts, MLXLinear
from executorch_mlx.llm.export.quantize import quantize_model
from executorch_mlx.serialization.read import read_payload
from loaded_method import LoadedMethod
from oprows import Dyn, bf16, data, f16, f32, floats, indices, ints, pytest_function, row
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.quant_primitives import MappingType

dequantize_affine = torch.ops.torchao.dequantize_affine.default


def dequantize_groups(q, scale, zero_point):
    return dequantize_affine(q, [1, 4], scale, zero_point, torch.int8, -8, 7)


def dequantize_blocks(q, scale):
    return dequantize_affine(q, [2, 8], scale, None, torch.int8, output_dtype=f16)


def choose_qparams(mapping):
    return lambda x: torch.ops.torchao.choose_qparams_affine(x, mapping, [1, 8], I8, -128, 127, 1e-6, f32, I8, True)


def quantize_affine(x, scale, zero_point):
    return torch.ops.torchao.quantize_affine(x, [1, 4], scale, zero_point, I8, -8, 7)


def rounded(choose, x, low, high, dtype):
    """Round x to integers and back, as PT2E does with activations whose range is computed in the program."""
    parameters = *choose(x, low, high, 1e-5, dtype), low, high, dtype
    return PT2E.dequantize_per_tensor(PT2E.quantize_per_tensor(x, *parameters), *parameters)


I8 = torch.int8
PT2E = torch.ops.quantized_decomposed
AFFINE = dict(group_size=32, bits=4)


class LinearGradient(MLXLinear):
    """The gradient of the input of a packed linear layer."""

    def forward(self, grad):
        return torch.ops.mlx.quantized_matmul_backward(grad, *self.packed_arguments())


def packed(*shape, bits=4, group_size=32):
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return quantize(w, bits, group_size)


def with_int8_activations(layer):
    layer.int8_activations = True
    return layer


def random_bytes(*shape, low=0, high=256, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def microscaled(mode, *shape):
    """Return random operands of a mode whose scales are bytes. There is no NaN, and the scales are near 1."""
    bits, group = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}[mode]
    codes = random_bytes(*shape[:-1], shape[-1] * bits // 8)
    if mode == "mxfp8":
        codes = codes & 0b10111111
    low, high = (48, 64) if mode == "nvfp4" else (125, 129)
    scales = random_bytes(*shape[:-1], shape[-1] // group, low=low, high=high, seed=1)
    return codes.view(torch.uint32), scales, dict(bits=bits, group_size=group, mode=mode)


def mode_rows(name, layer, *inputs):
    """Yield an op row for each mode whose scales are bytes."""
    for mode in ("mxfp4", "nvfp4", "mxfp8"):
        *operands, packing = microscaled(mode, *((4, 6, 64) if layer is MLXExperts else (6, 64)))
        yield row(f"mlx::{name}/{mode}", layer(*operands, **packing), *inputs, dtypes=(f32,), loose=3)


# The operands of the first op rows are not constants. Their quantization and dequantization are lowered to arithmetic.
ROWS = [
    row(
        "torchao::dequantize_affine",
        dequantize_groups,
        ints(3, 8, low=-8, high=8, dtype=I8),
        floats(3, 2, dtype=f32),
        ints(3, 2, low=-8, high=8, dtype=I8),
    ),
    row("torchao::dequantize_affine/blocks", dequantize_blocks, ints(4, 8, dtype=I8), floats(2, 1, dtype=f16)),
    *(
        row(
            f"torchao::choose_qparams_affine/{mapping}",
            choose_qparams(mapping),
            cases=[(floats(Dyn("n", 3), 8),)],
            edge_verified=False,
            dtypes=(f32, f16) if mapping == "ASYMMETRIC" else (f32,),
        )
        for mapping in ("SYMMETRIC", "ASYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR")
    ),
    row(
        "torchao::quantize_affine",
        quantize_affine,
        floats(3, 8),
        floats(3, 2, low=0.01, high=0.05, dtype=f32),
        ints(3, 2, low=-8, high=8, dtype=I8),
    ),
    row(
        "quantized_decomposed::quantize_per_tensor",
        PT2E.quantize_per_tensor,
        floats(3, 8),
        0.02,
        3,
        0,
        255,
        torch.uint8,
    ),
    row(
        "quantized_decomposed::quantize_per_tensor.tensor",
        PT2E.quantize_per_tensor,
        floats(3, 8),
        data([0.02], dtype=f32),
        data([-3]),
        -128,
        127,
        I8,
        dtypes=(f32,),
    ),
    row(
        "quantized_decomposed::quantize_per_channel",
        PT2E.quantize_per_channel,
        floats(3, 8),
        floats(8, low=0.01, high=0.05, dtype=f32),
        ints(8),
        1,
        -128,
        127,
        I8,
    ),
    row(
        "quantized_decomposed::dequantize_per_tensor",
        lambda q: (
            PT2E.dequantize_per_tensor(q, 0.02, 3, -128, 127, I8),
            PT2E.dequantize_per_tensor(q, 0.02, 3, -128, 127, I8, out_dtype=f16),
        ),
        ints(3, 8, dtype=I8),
    ),
    row(
        "quantized_decomposed::dequantize_per_tensor.tensor",
        PT2E.dequantize_per_tensor,
        ints(3, 8, dtype=I8),
        data([0.02], dtype=f32),
        data([-3]),
        -128,
        127,
        I8,
    ),
    row(
        "quantized_decomposed::dequantize_per_channel",
        lambda q, scales, zero_points: (
            PT2E.dequantize_per_channel(q, scales, zero_points, 1, -128, 127, I8),
            PT2E.dequantize_per_channel(q, scales, None, 1, -128, 127, I8, out_dtype=bf16),
        ),
        ints(3, 8, dtype=I8),
        floats(8, low=0.01, high=0.05, dtype=f32),
        ints(8),
    ),
    row("fake_quantize_per_tensor_affine", floats(3, 8, low=-1, high=20), 0.05, 3, 0, 255, dtypes=(f32,)),
    row(
        "fake_quantize_per_tensor_affine.tensor_qparams",
        floats(3, 8),
        data([0.25], dtype=f32),
        data([-2], dtype=torch.int32),
        -8,
        7,
        dtypes=(f32,),
    ),
    row(
        "fake_quantize_per_channel_affine",
        floats(3, 8),
        floats(8, low=0.1, high=0.5, dtype=f32),
        ints(8, low=-2, high=3, dtype=torch.int32),
        1,
        -8,
        7,
        dtypes=(f32,),
    ),
    row(
        "program/dynamic rounding",
        lambda x: (
            rounded(PT2E.choose_qparams, x, -128, 127, I8),
            rounded(PT2E.choose_qparams, x.abs() + 1, 0, 255, torch.uint8),
        ),
        cases=[(floats(5, 8),), (floats(5, 8, low=0, high=1e-6),)],
    ),
    row(
        "program/dynamic rounding, symmetric",
        lambda x: (
            rounded(PT2E.choose_qparams_symmetric, x, -127, 127, I8),
            rounded(PT2E.choose_qparams_symmetric, x, 0, 255, torch.uint8),
        ),
        floats(5, 8),
    ),
    row(
        "_int_mm",
        cases=[
            (ints(20, 300, low=low, high=high, dtype=dtype), ints(300, 16, low=-128, high=128, dtype=I8))
            for low, high, dtype in ((0, 256, torch.uint8), (-128, 128, I8))
        ],
        edge_verified=False,
    ),
    row(
        "_int_mm/long sums",
        torch._int_mm,
        ints(17, 30_001, low=111, high=128, dtype=I8),
        ints(30_001, 8, low=-128, high=-100, dtype=I8),
        edge_verified=False,
    ),
    row("mlx::quantized_matmul", MLXLinear(*packed(6, 64), **AFFINE), floats(2, 3, 64), cases=[(floats(64),)], loose=3),
    row(
        "mlx::quantized_matmul/bias",
        MLXLinear(*packed(6, 64), bias=torch.ones(6), **AFFINE),
        floats(Dyn("n", 3), 64),
        dtypes=(f32,),
        loose=3,
    ),
    row(
        "mlx::int8_quantized_matmul",
        with_int8_activations(MLXLinear(*packed(6, 64), **AFFINE)),
        floats(Dyn("n", 3), 64),
        cases=[(floats(64),)],
        loose=3,
        edge_verified=False,
        nodes=["Int8QuantizedMatmulNode"],
    ),
    row(
        "mlx::int8_quantized_matmul/portable",
        with_int8_activations(MLXLinear(*packed(6, 64), **AFFINE)),
        floats(2, 3, 64),
        loose=3,
        nodes=["QuantizedMatmulNode"],
    ),
    *mode_rows("quantized_matmul", MLXLinear, floats(3, 64)),
    row(
        "mlx::quantized_embedding",
        MLXEmbedding(*packed(6, 64), **AFFINE),
        indices(2, 3, below=6),
        cases=[(indices(below=6),)],
    ),
    row(
        "mlx::quantized_embedding/scale",
        MLXEmbedding(*packed(6, 64), factor=8.5, **AFFINE),
        indices(Dyn("n", 3), below=6),
        dtypes=(f32,),
    ),
    *mode_rows("quantized_embedding", MLXEmbedding, indices(3, below=6)),
    row(
        "mlx::quantized_matmul_backward",
        LinearGradient(*packed(6, 64), **AFFINE),
        floats(2, 3, 6),
        cases=[(floats(6),)],
        loose=3,
        edge_verified=False,
    ),
    row(
        "mlx::gathered_quantized_matmul",
        MLXExperts(*packed(4, 6, 64), **AFFINE),
        floats(Dyn("n", 3), 1, 1, 64),
        indices(Dyn("n", 3), 2, below=4),
        loose=3,
        nodes=["GatherQmmNode"],
    ),
    *mode_rows("gathered_quantized_matmul", MLXExperts, floats(3, 2, 64), indices(3, below=4)),
]

test_op_row = pytest_function(ROWS)

# Upper bounds of the norm of the error, relative to the norm of the expected result. The expected result is computed in
# float32 from the dequantized weight.
ERROR_BOUNDS = {f32: 1e-5, f16: 1e-3, bf16: 5e-3}
GRANULARITIES = {"32": PerGroup(32), "64": PerGroup(64), "128": PerGroup(128), "row": PerAxis(0)}
MAPPINGS = {"symmetric": MappingType.SYMMETRIC, "zero_points": MappingType.ASYMMETRIC}
WIDTHS = (torch.int2, torch.int3, torch.int4, torch.int5, torch.int6, torch.int8)


def lowered(layer, config, dtype, x, compile_config=None):
    """Quantize, export and lower a model of one layer. Returns the lowered program and the partitioner's report."""
    model = torch.nn.Sequential(layer).to(dtype).eval()
    quantize_(model, config, lambda module, name: module is layer)
    partitioner = MLXPartitioner()
    exported = torch.export.export(model, (x,))
    manager = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=compile_config)
    return manager, partitioner.explain()


def check(layer, config, dtype, x, compile_config=None):
    """Check that the quantized layer is fully delegated and accurate. Returns the IR nodes of the payload."""
    torch.manual_seed(0)
    manager, report = lowered(layer, config, dtype, x, compile_config)
    assert not report.refused, report
    program = manager.to_executorch()
    method = LoadedMethod(program.buffer)
    (actual,) = method.execute([x])
    weight = layer.weight.dequantize().float()
    if x.is_floating_point():
        bias = None if layer.bias is None else layer.bias.float()
        expected = torch.nn.functional.linear(x.float(), weight, bias)
    else:
        expected = weight[x]
    assert actual.dtype == dtype and actual.shape == expected.shape
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < ERROR_BOUNDS[dtype], f"relative error {error:.2e}"
    (payload,) = program.executorch_program.backend_delegate_data
    (chain,) = read_payload(bytes(payload.data)).instruction_chains
    return [i.op for i in chain.instructions]


def names(ops):
    return [op.NAME for op in ops]


@pytest.mark.parametrize("dtype", ERROR_BOUNDS, ids=str)
@pytest.mark.parametrize(
    "granularity, mapping",
    [("32", "symmetric"), ("32", "zero_points"), ("64", "zero_points"), ("128", "symmetric"), ("row", "zero_points")],
)
@pytest.mark.parametrize("width", (torch.int4, torch.int8), ids=str)
def test_linear(delegate, width, granularity, mapping, dtype):
    config = IntxWeightOnlyConfig(width, GRANULARITIES[granularity], MAPPINGS[mapping])
    ops = check(torch.nn.Linear(256, 48), config, dtype, torch.randn(2, 3, 256).to(dtype))
    assert [name for name in names(ops) if name != "AsTypeNode"] == ["QuantizedMatmulNode", "AddNode"]
    # Half precision does not hold the products of scales and zero points, but those of scales and powers of two.
    assert ("AsTypeNode" in names(ops)) == (mapping == "zero_points" and dtype != f32)
    product = ops[names(ops).index("QuantizedMatmulNode")]
    assert product.bits == (4 if width == torch.int4 else 8)
    assert product.group_size == (128 if granularity == "row" else int(granularity))


@pytest.mark.parametrize("dtype", ERROR_BOUNDS, ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("width, granularity", [(torch.int4, "32"), (torch.int8, "row")], ids=str)
def test_embedding(delegate, width, granularity, mapping, dtype):
    config = IntxWeightOnlyConfig(width, GRANULARITIES[granularity], MAPPINGS[mapping])
    ops = check(torch.nn.Embedding(20, 128), config, dtype, torch.tensor([[3, 0, 19], [7, 7, 1]]))
    assert names(ops)[:4] == ["TakeNode"] * 3 + ["DequantizeNode"]


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_each_number_of_bits(delegate, width):
    config = IntxWeightOnlyConfig(width, PerGroup(32), MappingType.ASYMMETRIC)
    ops = check(torch.nn.Linear(96, 8, bias=False), config, f32, torch.randn(2, 96))
    assert names(ops) == ["QuantizedMatmulNode"]
    assert ops[0].bits == int(str(width).removeprefix("torch.int"))


@pytest.mark.parametrize("dtype", ERROR_BOUNDS, ids=str)
def test_int8_weight_only(delegate, dtype):
    ops = check(torch.nn.Linear(256, 48), Int8WeightOnlyConfig(), dtype, torch.randn(3, 256).to(dtype))
    assert "QuantizedMatmulNode" in names(ops) and "AddmmNode" not in names(ops)


@pytest.mark.parametrize("dtype", (f32, bf16), ids=str)
def test_float8_weight_only(delegate, dtype):
    """The weights become floats of the dtype of the activations, because MLX has no dtype of 8-bit floats."""
    x, layer = torch.randn(3, 256).to(dtype), torch.nn.Linear(256, 48)
    ops = check(layer, Float8WeightOnlyConfig(), dtype, x, EdgeCompileConfig(_check_ir_validity=False))
    assert names(ops)[0] == "AddmmNode" and "TransposeNode" not in names(ops)


def test_large_float8_weight_has_the_dtype_of_the_activations(delegate):
    """The scales are multiplied into the weight when the program is serialized, not in float32 in every call."""
    x, layer = torch.randn(3, 512).to(bf16), torch.nn.Linear(512, 256)
    ops = check(layer, Float8WeightOnlyConfig(), bf16, x, EdgeCompileConfig(_check_ir_validity=False))
    assert names(ops) == ["AddmmNode", "AddNode"]


@pytest.mark.parametrize("dtype", (f32, bf16), ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_linear_4096_by_4096(delegate, mapping, dtype):
    config = IntxWeightOnlyConfig(torch.int4, PerGroup(64), MAPPINGS[mapping])
    check(torch.nn.Linear(4096, 4096, bias=False), config, dtype, torch.randn(4, 4096).to(dtype))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(96, 64)
        self.head = torch.nn.Linear(64, 96, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def quantize_with_torchao(model):
    quantize_(model, IntxWeightOnlyConfig(torch.int4, PerGroup(32)), lambda module, name: hasattr(module, "weight"))


def quantize_for_mlx(model):
    quantize_model(model, 4, 32)


@pytest.mark.parametrize(
    "quantize, dtype", [(quantize_with_torchao, f32), (quantize_for_mlx, f32), (quantize_for_mlx, bf16)]
)
def test_tied_weight_is_stored_once(delegate, quantize, dtype):
    model, tokens = Tied().to(dtype).eval(), torch.tensor([[3, 0, 95]])
    quantize(model)
    length = torch.export.Dim("length", min=1, max=32)
    exported = torch.export.export(model, (tokens,), dynamic_shapes=({1: length},))
    manager = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()])
    program = manager.to_executorch()
    (payload,) = program.executorch_program.backend_delegate_data
    assert read_payload(bytes(payload.data)).num_constant_tensors == 3
    method = LoadedMethod(program.buffer)
    tolerance = 1e-5 if dtype == f32 else 1.6e-2
    for x in (tokens, tokens[:, :1].contiguous()):
        torch.testing.assert_close(method.execute([x])[0], model(x), rtol=tolerance, atol=tolerance)


def test_weight_with_an_axis_that_no_group_size_divides_is_dequantized(delegate):
    config = IntxWeightOnlyConfig(torch.int4, PerAxis(0))
    ops = check(torch.nn.Linear(40, 8), config, f32, torch.randn(2, 40))
    assert "QuantizedMatmulNode" not in names(ops)


@pytest.mark.parametrize(
    "config",
    (Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)), Int8DynamicActivationInt8WeightConfig()),
    ids=lambda config: type(config).__name__,
)
def test_dynamic_activations(delegate, config):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)).eval(), torch.randn(2, 5, 64)
    quantize_(model, config)
    with torch.no_grad():
        exported = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim("n", min=1, max=16)},))
    partitioner = MLXPartitioner()
    edge = EdgeCompileConfig(_check_ir_validity=False)  # _int_mm is not in core ATen
    program = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=edge).to_executorch()
    assert not partitioner.explain().refused, partitioner.explain()
    method = LoadedMethod(program.buffer)
    for inputs in (x, x[:, :1].contiguous()):
        torch.testing.assert_close(method.execute([inputs])[0], model(inputs).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_per_channel, is_dynamic", [(False, False), (True, False), (True, True)])
def test_pt2e(delegate, is_per_channel, is_dynamic):
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 8)
    model, x = torch.nn.Sequential(*layers).eval(), torch.randn(2, 3, 9, 9)
    config = get_symmetric_quantization_config(is_per_channel=is_per_channel, is_dynamic=is_dynamic)
    quantizer = XNNPACKQuantizer().set_global(config)
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    model = convert_pt2e(prepared)
    partitioner = MLXPartitioner()
    program = to_edge_transform_and_lower(torch.export.export(model, (x,)), partitioner=[partitioner]).to_executorch()
    assert not partitioner.explain().refused, partitioner.explain()
    (payload,) = program.executorch_program.backend_delegate_data
    (chain,) = read_payload(bytes(payload.data)).instruction_chains
    assert "QuantizedMatmulNode" in names(i.op for i in chain.instructions)
    method = LoadedMethod(program.buffer)
    # A sum between two integers may be rounded to either of them. The scale of the result is below 0.02.
    torch.testing.assert_close(method.execute([x])[0], model(x), rtol=0, atol=0.02)


@pytest.mark.parametrize("bits", (2, 3, 4, 5, 6, 8))
def test_pack_and_unpack(bits):
    q = torch.randint(0, 2**bits, (3, 64), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    for values, words in zip(q.tolist(), pack(q, bits).tolist()):
        stream = sum(word << (32 * i) for i, word in enumerate(words))
        assert [stream >> (bits * i) & (2**bits - 1) for i in range(64)] == values
    assert unpack(pack(q, bits), bits).equal(q)
