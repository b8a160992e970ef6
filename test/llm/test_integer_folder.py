"""Checkpoints of GPTQ, AWQ and compressed-tensors, against the model with the dequantized weights."""

import json

import pytest
import torch
import transformers as hf
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.mtp import UnknownHead, load_mtp
from executorch_mlx.llm.export.packed import MLXExperts, MLXLinear
from executorch_mlx.llm.export.weights import load_causal_lm
from safetensors.torch import load_file, save_file

GROUP = 32
PROMPT = torch.tensor([[5, 17, 100, 3, 77, 9]])


def integers(weight, bits=4, columns=None):
    """Return integers from 0 on [N, K], scales [N, G], zeros [N, G], and the values of the integers, for a weight."""
    columns = torch.arange(weight.shape[1]) // GROUP if columns is None else columns
    order = columns.argsort(stable=True)
    groups = weight[:, order].unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    q = (groups / scales + zeros).round().clamp(0, 2**bits - 1)
    values = ((q - zeros) * scales).flatten(1)
    back = order.argsort()
    return q.flatten(1)[:, back].to(torch.uint8), scales.squeeze(-1), zeros.squeeze(-1).to(torch.uint8), values[:, back]


def words(q):
    """Pack 4-bit integers along the last axis."""
    lanes = q.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return lanes.sum(-1).to(torch.uint32).view(torch.int32)


def gptq(weight, columns=None):
    q, scales, zeros, values = integers(weight, columns=columns)
    stored = {"qweight": words(q).T, "qzeros": words(((zeros.int() - 1) % 16).T), "scales": scales.half().T}
    return stored | {"g_idx": torch.arange(q.shape[1]) // GROUP if columns is None else columns}, values


def gptq_in_order_of_activations(weight):
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    return gptq(weight, order // GROUP)


def awq(weight):
    q, scales, zeros, values = integers(weight)

    def stored(x):
        return words(x.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    return {"qweight": stored(q), "qzeros": stored(zeros), "scales": scales.half().T}, values


def compressed(weight):
    q, scales, zeros, values = integers(weight)
    shape = torch.tensor(weight.shape)
    return {
        "weight_packed": words(q), "weight_scale": scales, "weight_zero_point": words(zeros.T).T, "weight_shape": shape
    }, values  # fmt: skip


def compressed_int8(weight):
    scales = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scales).round()
    return {"weight": q.to(torch.int8), "weight_scale": scales}, q * scales


def compressed_float8(weight):
    scales = weight.abs().amax(1, keepdim=True) / 448
    q = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scales, "input_scale": torch.ones(1)}, q.float() * scales


COMPRESSED = {"quant_method": "compressed-tensors"}
# A function that quantizes a weight → the settings of its format, and whether the loaded weights are packed.
FORMATS = {
    gptq: ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, True),
    gptq_in_order_of_activations: ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, False),
    awq: ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, True),
    compressed: (COMPRESSED | {"format": "pack-quantized"}, True),
    compressed_int8: (COMPRESSED | {"format": "int-quantized"}, True),
    compressed_float8: (COMPRESSED | {"format": "float-quantized"}, False),
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """A folder with a mixture of experts in floats, each expert with tensors of its own."""
    torch.manual_seed(0)
    config = hf.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=200, max_position_embeddings=128, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, initializer_range=0.15, mlp_only_layers=[0],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("floats")
    hf.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def write(folder, tensors, floats, **settings):
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((floats / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("quantize", FORMATS, ids=lambda function: function.__name__)
def test_logits_equal_those_of_the_dequantized_weights(floats, quantize, tmp_path):
    settings, is_packed = FORMATS[quantize]
    stored, dequantized = {}, load_file(floats / "model.safetensors")
    for name, tensor in list(dequantized.items()):
        if name.endswith("_proj.weight"):
            parts, dequantized[name] = quantize(tensor)
            stored |= {f"{name.removesuffix('weight')}{leaf}": part for leaf, part in parts.items()}
        else:
            stored[name] = tensor
    expected = load_causal_lm(write(tmp_path / "dequantized", dequantized, floats))
    got = load_causal_lm(write(tmp_path / "stored", stored, floats, quantization_config=settings), dtype=torch.float32)
    packed = {type(m) for m in got.modules() if isinstance(m, (MLXLinear, MLXExperts))}
    assert packed == ({MLXLinear, MLXExperts} if is_packed else set())
    with torch.no_grad():
        logits, of_values = (use_gathered_experts(model)(PROMPT).logits for model in (got, expected))
    torch.testing.assert_close(logits, of_values, rtol=1e-4, atol=1e-4)


def test_a_quantized_head_for_multi_token_prediction_is_left_out(floats, tmp_path):
    tensors = {f"mtp.layers.0.self_attn.q_proj.{leaf}": t for leaf, t in gptq(torch.rand(64, 64))[0].items()}
    model = load_causal_lm(floats)
    with pytest.raises(UnknownHead, match="its weights are quantized, such as mtp.layers.0.self_attn.q_proj.qweight"):
        load_mtp(model, write(tmp_path / "mtp", tensors, floats))


def test_a_damaged_weight_is_refused(floats, tmp_path):
    tensors = load_file(floats / "model.safetensors")
    path = "model.layers.0.mlp.up_proj"
    tensors[f"{path}.qweight"] = torch.zeros(8, 128, dtype=torch.int32)
    folder = write(tmp_path / "damaged", tensors, floats, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=f"{path}: cannot read the tensors qweight, weight: 'qzeros'"):
        load_causal_lm(folder)
