"""Linear layers with NVFP4 or MX weights of torchao keep the format of their weights in an export."""

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.microscaled import use_packed_weights
from executorch_mlx.serialization.read import read_payload
from loaded_method import LoadedMethod
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization import quantize_
from transformers import LlamaConfig, LlamaForCausalLM


def nvfp4(scaled):
    return lambda model: quantize_(model, NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=scaled))


def mx(dtype):
    def quantize(model):
        model[0].weight = torch.nn.Parameter(MXTensor.to_mx(model[0].weight, dtype), requires_grad=False)

    return quantize


QUANTIZERS = {
    "nvfp4": nvfp4(False),
    "nvfp4, scaled": nvfp4(True),
    "mxfp8": mx(torch.float8_e4m3fn),
    "mxfp4": mx(torch.float4_e2m1fn_x2),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_linear_layer_keeps_its_format(delegate, name, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48)).to(dtype).requires_grad_(False).eval()
    x = torch.randn(2, 3, 64).to(dtype)
    QUANTIZERS[name](model)
    weight = model[0].weight.dequantize(torch.float32)
    expected = torch.nn.functional.linear(x.float(), weight, model[0].bias.float())
    assert use_packed_weights(model) == ["0"]
    partitioner = MLXPartitioner()
    lowered = to_edge_transform_and_lower(torch.export.export(model, (x,)), partitioner=[partitioner])
    assert not partitioner.explain().refused, partitioner.explain()
    program = lowered.to_executorch()
    (payload,) = program.executorch_program.backend_delegate_data
    (chain,) = read_payload(bytes(payload.data)).instruction_chains
    assert chain.instructions[0].op.mode == name.split(",")[0]
    (actual,) = LoadedMethod(program.buffer).execute([x])
    assert actual.dtype == dtype
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_a_product_in_float16_that_is_finite_only_with_its_factor(delegate):
    """The integers of NVFP4 times their scales are up to 2688, whatever the factor of the weight is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48)).requires_grad_(False).eval()
    QUANTIZERS["nvfp4, scaled"](model)
    use_packed_weights(model)
    model, x = model.half(), 9 * torch.randn(2, 3, 64).half()
    expected = torch.nn.functional.linear(x.float(), model[0].weight, model[0].bias.float()).half()
    torch.testing.assert_close(model(x), expected, rtol=2e-3, atol=2e-3)
    lowered = to_edge_transform_and_lower(torch.export.export(model, (x,)), partitioner=[MLXPartitioner()])
    (actual,) = LoadedMethod(lowered.to_executorch().buffer).execute([x])
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


def test_quantized_activations_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(64, 48)).to(torch.bfloat16)
    quantize_(model, MXDynamicActivationMXWeightConfig())
    with pytest.raises(ValueError, match="0: got quantized activations"):
        use_packed_weights(model)


def test_a_format_that_mlx_lacks_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    mx(torch.float8_e5m2)(model)
    with pytest.raises(ValueError, match="0: weight: got MXTensor of 8 bits in blocks of 32, expected mxfp4"):
        use_packed_weights(model)


def test_export_keeps_the_format_and_quantizes_the_other_layers(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    quantize_(model.model.layers, NVFP4WeightOnlyConfig())
    ids = torch.tensor([[5, 17, 20, 3]])
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
    exported = export_llm(model, quantize="int8", outputs="logits", dtype=torch.float32)
    assert not exported.report.refused, exported.report
    (payload,) = exported.program.executorch_program.backend_delegate_data
    (chain,) = read_payload(bytes(payload.data)).instruction_chains
    modes = [i.op.mode for i in chain.instructions if type(i.op).__name__ == "QuantizedMatmulNode"]
    assert modes == ["nvfp4"] * 7 + ["affine"]
    exported.save(tmp_path / "model.pte")
    method = LoadedMethod(tmp_path / "model.pte")
    logits = method.execute([ids, torch.tensor([0])])[0][0, -1]
    assert (logits - expected).norm() / expected.norm() < 0.02
