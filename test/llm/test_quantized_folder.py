"""Checkpoints of GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8, BitNet and others, against dequantized weights."""

import json
import re

import pytest
import torch
import transformers as hf
from executorch_mlx.custom_ops.packing import dequantize
from executorch_mlx.llm.export.checkpoints.head import UnknownHead, load_mtp
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.packed import MLXEmbedding, MLXExperts, MLXLinear
from executorch_mlx.llm.export.quantization.scale_search import Format, quantized
from executorch_mlx.llm.export.survey import survey
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
    stored["bias"] = torch.zeros(len(weight))  # older versions store it for every layer
    return stored | {"g_idx": torch.arange(q.shape[1]) // GROUP if columns is None else columns}, values


def gptq_in_order_of_activations(weight):
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    return gptq(weight, order // GROUP)


def gptq_of_auto_round(weight):
    stored, values = gptq(weight)
    return {name: stored[name] for name in ("qweight", "qzeros", "scales")}, values


def auto_round(weight):
    q, scales, zeros, values = integers(weight)
    return {"qweight": words(q).T, "qzeros": words(zeros.T), "scales": scales.half().T}, values


def awq_of_auto_round(weight):
    return awq(weight)


def awq(weight):
    q, scales, zeros, values = integers(weight)

    def stored(x):
        return words(x.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    return {"qweight": stored(q), "qzeros": stored(zeros), "scales": scales.half().T}, values


def compressed(weight):
    q, scales, zeros, values = integers(weight)
    shape = torch.tensor(weight.shape)
    return {
        "weight_packed": words(q),
        "weight_scale": scales,
        "weight_zero_point": words(zeros.T).T,
        "weight_shape": shape,
    }, values


def compressed_int8(weight):
    scales = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scales).round()
    unused = {"input_zero_point": torch.zeros(1), "k_scale": torch.ones(1)}
    return {"weight": q.to(torch.int8), "weight_scale": scales} | unused, q * scales


def compressed_float8(weight):
    scales = weight.abs().amax(1, keepdim=True) / 448
    q = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scales, "input_scale": torch.ones(1)}, q.float() * scales


def float8(weight, name, scales):
    """Return the tensors of a weight in FP8, and its values. `scales` [N, K] are those of the elements."""
    q = (weight / scales).to(torch.float8_e4m3fn)
    stored = scales[:: BLOCK[0], :: BLOCK[1]] if name == "weight_scale_inv" else scales[0, 0]
    return {"weight": q, name: stored, "input_scale": torch.ones(1)}, q.float() * scales


def float8_in_blocks(weight):
    scales = torch.zeros_like(weight)
    for block in [
        columns
        for rows in torch.arange(weight.numel()).view(weight.shape).split(BLOCK[0])
        for columns in rows.split(BLOCK[1], 1)
    ]:
        scales.view(-1)[block] = weight.view(-1)[block].abs().max() / 448
    return float8(weight, "weight_scale_inv", scales)


def compressed_float8_in_blocks(weight):
    parts, values = float8_in_blocks(weight)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, values


def float8_by_tensor(weight):
    return float8(weight, "weight_scale", (weight.abs().max() / 448).expand(weight.shape))


def float8_of_quark(weight):
    stored, values = float8_by_tensor(weight)
    return stored | {"output_scale": torch.ones(())}, values


def nvfp4(weight):
    factor = weight.abs().max() / (6 * 448)
    q, scales, _ = quantized(weight / factor, Format.of("nvfp4"), torch.float32)
    return (
        q.view(torch.uint8),
        scales.view(torch.float8_e4m3fn),
        factor,
        dequantize(q, scales, None, 16, 4, "nvfp4") * factor,
    )


def nvfp4_of_modelopt(weight):
    q, scales, factor, values = nvfp4(weight)
    return {"weight": q, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.ones(())}, values


def compressed_nvfp4(weight):
    q, scales, factor, values = nvfp4(weight)
    return {"weight_packed": q, "weight_scale": scales, "weight_global_scale": 1 / factor.reshape(1)}, values


def compressed_mxfp4(weight):
    q, scales, _ = quantized(weight, Format.of("mxfp4"), torch.float32)
    return {"weight_packed": q.view(torch.uint8), "weight_scale": scales}, dequantize(q, scales, None, 32, 4, "mxfp4")


def compressed_mixed(weight):
    return compressed_mxfp4(weight) if weight.shape[0] == 64 else compressed(weight)


def indices(x, values):
    """Return the index of the nearest of `values` for each element of `x`, uint8."""
    return (x.unsqueeze(-1) - values).abs().argmin(-1).to(torch.uint8)


def bitsandbytes_4_bits(weight, is_nested=True):
    quant_map, nested_map = torch.linspace(-1, 1, 16) ** 3, torch.linspace(-1, 1, 256)
    blocks = weight.reshape(-1, GROUP)
    absmax = blocks.abs().amax(1)
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "bfloat16", "shape": list(weight.shape)}
    stored = {"weight.absmax": absmax}
    if is_nested:  # the absmax of the blocks are quantized too
        size = 48  # the last group is smaller
        offset = float(absmax.mean())
        rest = absmax - offset
        limits = torch.stack([part.abs().max() for part in rest.split(size)])
        factors = limits.repeat_interleave(size)[: len(rest)]
        state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
        q = indices(rest / factors, nested_map)
        absmax = nested_map[q.long()] * factors + offset
        stored = {"weight.absmax": q, "weight.nested_absmax": limits, "weight.nested_quant_map": nested_map}
    q = indices(blocks / absmax[:, None], quant_map)
    packed = q.flatten()[::2] << 4 | q.flatten()[1::2]
    state = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    stored |= {"weight.quant_map": quant_map, "weight.quant_state.bitsandbytes__nf4": state}
    return stored | {"weight": packed[:, None]}, (quant_map[q.long()] * absmax[:, None]).reshape(weight.shape)


def bitsandbytes_4_bits_as_bfloat16(weight):
    stored, values = bitsandbytes_4_bits(weight, is_nested=False)
    return stored | {"weight": stored["weight"].view(-1).view(torch.bfloat16)[:, None]}, values


def bitsandbytes_8_bits(weight):
    limits = weight.abs().amax(1)
    q = (weight / limits[:, None] * 127).round().to(torch.int8)
    return {"weight": q, "SCB": limits, "weight_format": torch.tensor(0, dtype=torch.uint8)}, q * limits[:, None] / 127


def bitnet(weight):
    factor = weight.abs().mean()
    q = (weight / factor).round().clamp(-1, 1)
    parts = (q + 1).to(torch.uint8).chunk(4)
    packed = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
    return {"weight": packed, "weight_scale": 1 / factor.reshape(1)}, q * factor


def bitnet_with_factors(weight):
    stored, values = bitnet(weight)
    return stored | {"weight_scale": 1 / stored["weight_scale"]}, values


def gemma(weight, bits=4):
    limit = 2 ** (bits - 1)
    scales = weight.abs().amax(1, keepdim=True) / (limit - 0.5)
    q = (weight / scales).round().clamp(-limit, limit - 1)
    lanes = (q + limit).to(torch.uint8).unflatten(1, (-1, 8 // bits)).int() << torch.arange(0, 8, bits)
    packed = q.to(torch.int8) if bits == 8 else lanes.sum(-1).to(torch.uint8)
    unused = {"input_activation_scale": torch.ones(()), "k_cache_scale": torch.ones(())}
    return {"weight": packed, "weight_scale": scales} | unused, q * scales


def gemma_of_2_bits(weight):
    return gemma(weight, bits=2)


def gemma_of_8_bits(weight):
    return gemma(weight, bits=8)


def gemma_embedding(weight):
    stored, values = gemma(weight)
    return {"embedding_quantized": stored["weight"], "embedding_scale": stored["weight_scale"]}, values


def metal(weight):
    q, scales, biases = quantized(weight, Format(4, GROUP), torch.float32)
    return {"weight": q, "scales": scales, "qbiases": biases}, dequantize(q, scales, biases, GROUP, 4)


BLOCK = [24, 48]  # the last blocks are smaller
COMPRESSED = {"quant_method": "compressed-tensors"}
# A function that quantizes a weight → the settings of its format, and whether the loaded weights are packed.
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int"}
FORMATS = {
    gptq: ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, True),
    gptq_in_order_of_activations: ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, False),
    awq: ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, True),
    gptq_of_auto_round: (AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, True),
    auto_round: (AUTO_ROUND | {"packing_format": "auto_round", "sym": False}, True),
    awq_of_auto_round: (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, True),
    compressed: (COMPRESSED | {"format": "pack-quantized"}, True),
    compressed_int8: (COMPRESSED | {"format": "int-quantized"}, True),
    compressed_float8: (COMPRESSED | {"format": "float-quantized"}, False),
    nvfp4_of_modelopt: ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, True),
    compressed_nvfp4: (COMPRESSED | {"format": "nvfp4-pack-quantized"}, True),
    compressed_mxfp4: (COMPRESSED | {"format": "mxfp4-pack-quantized"}, True),
    compressed_mixed: (COMPRESSED | {"format": "mixed-precision"}, True),
    bitsandbytes_4_bits: ({"quant_method": "bitsandbytes", "load_in_4bit": True}, False),
    bitsandbytes_4_bits_as_bfloat16: ({"quant_method": "bitsandbytes", "_load_in_4bit": True}, False),
    bitsandbytes_8_bits: ({"quant_method": "bitsandbytes", "load_in_8bit": True}, False),
    float8_in_blocks: ({"quant_method": "fp8", "weight_block_size": BLOCK}, False),
    compressed_float8_in_blocks: (
        COMPRESSED
        | {"format": "float-quantized", "config_groups": {"group_0": {"weights": {"block_structure": "24x48"}}}},
        False,
    ),
    float8_by_tensor: ({"quant_method": "fp8", "activation_scheme": "static"}, False),  # AutoFP8
    float8_of_quark: ({"quant_method": "quark", "quant_mode": "eager_mode"}, False),
    bitnet: ({"quant_method": "bitnet"}, True),
    bitnet_with_factors: ({"quant_method": "bitnet", "linear_class": "autobitlinear"}, True),
    metal: ({"quant_method": "metal", "bits": 4, "group_size": GROUP}, True),
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """A folder with a mixture of experts in floats, each expert with tensors of its own."""
    torch.manual_seed(0)
    config = hf.Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=200,
        max_position_embeddings=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        initializer_range=0.15,
        mlp_only_layers=[0],
    )
    folder = tmp_path_factory.mktemp("floats")
    hf.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def write(folder, tensors, floats, **settings):
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((floats / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("quantize", FORMATS, ids=lambda function: function.__name__)
def test_logits_equal_those_of_the_dequantized_weights(floats, quantize, tmp_path, monkeypatch):
    # With such a GPU, transformers would keep FP8 weights.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    packed = check_logits(floats, quantize, tmp_path)
    # Packed experts have no factor for the whole weight.
    expected = {MLXLinear} if "nvfp4" in quantize.__name__ else {MLXLinear, MLXExperts}
    assert packed == (expected if FORMATS[quantize][1] else set())


def check_logits(floats, quantize, folder, pattern="_proj.weight$", is_transposed=False):
    """Quantize the weights whose names have `pattern`, compare the logits, and return the classes of packed layers."""
    stored, dequantized = {}, load_file(floats / "model.safetensors")
    for name, tensor in list(dequantized.items()):
        if re.search(pattern, name):
            parts, values = quantize(tensor.T.contiguous() if is_transposed else tensor)
            dequantized[name] = values.T if is_transposed else values
            stored |= {f"{name.removesuffix('weight')}{leaf}": part for leaf, part in parts.items()}
    stored |= {name: tensor for name, tensor in dequantized.items() if not re.search(pattern, name)}
    expected = load_causal_lm(write(folder / "dequantized", dequantized, floats))
    got = load_causal_lm(
        write(folder / "stored", stored, floats, quantization_config=FORMATS[quantize][0]), dtype=torch.float32
    )
    with torch.no_grad():
        logits, of_values = (use_gathered_experts(model)(PROMPT).logits for model in (got, expected))
    torch.testing.assert_close(logits, of_values, rtol=1e-4, atol=1e-4)
    return {type(m) for m in got.modules() if isinstance(m, (MLXEmbedding, MLXLinear, MLXExperts))}


@pytest.mark.parametrize("quantize", [gemma, gemma_of_2_bits, gemma_of_8_bits, gemma_embedding])
def test_gemma(quantize, floats, tmp_path, monkeypatch):
    """Its numbers of bits follow from the shapes. Experts stay floats."""
    is_embedding = quantize is gemma_embedding
    pattern = r"embed_tokens\.weight$" if is_embedding else r"(self_attn|layers\.0\.mlp)\..*_proj\.weight$"
    monkeypatch.setitem(FORMATS, quantize, ({"quant_method": "gemma", "num_bits": 4}, True))
    assert check_logits(floats, quantize, tmp_path, pattern) == {MLXEmbedding if is_embedding else MLXLinear}


@pytest.mark.parametrize(
    "config, changes, pattern",
    [
        # Layers that store the transpose of a weight, and biases whose names transformers ignores in some checkpoints.
        (hf.GPT2Config, dict(n_embd=64, n_head=4, n_layer=1, n_positions=16), r"c_(attn|proj|fc)\.weight$"),
        # The experts have one tensor for each projection, and stay floats.
        (
            hf.GraniteMoeConfig,
            dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_local_experts=4, intermediate_size=64),
            r"_proj\.weight$",
        ),
    ],
)
def test_other_layouts(config, changes, pattern, tmp_path):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config(**changes, vocab_size=200, initializer_range=0.15))
    model.save_pretrained(tmp_path / "floats")
    assert check_logits(tmp_path / "floats", gptq, tmp_path, pattern, config is hf.GPT2Config) == {MLXLinear}


@pytest.mark.parametrize("quantize", [gptq, compressed_float8])
def test_experts_that_transformers_cannot_stack(quantize, tmp_path):
    """Tools that quantize Llama 4 store each expert on its own. transformers has no conversion of such experts."""
    torch.manual_seed(0)
    config = hf.Llama4TextConfig(
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=200,
        num_local_experts=2,
        interleave_moe_layer_step=1,
        initializer_range=0.15,
    )
    hf.Llama4ForCausalLM(config).save_pretrained(tmp_path / "floats")
    dequantized = load_file(tmp_path / "floats" / "model.safetensors")
    stored, path = dict(dequantized), "model.layers.0.feed_forward.experts"
    for name, projections in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
        for expert, transposed in enumerate(stored.pop(f"{path}.{name}")):
            for projection, columns in zip(projections, transposed.chunk(len(projections), 1)):
                parts, values = quantize(columns.T.contiguous())
                stored |= {f"{path}.{expert}.{projection}.{leaf}": part for leaf, part in parts.items()}
                columns.copy_(values.T)  # a view of the tensor in `dequantized`
    expected = load_causal_lm(write(tmp_path / "dequantized", dequantized, tmp_path / "floats"))
    settings = FORMATS[quantize][0]
    got = load_causal_lm(
        write(tmp_path / "stored", stored, tmp_path / "floats", quantization_config=settings), dtype=torch.float32
    )
    with torch.no_grad():
        logits, of_values = (use_gathered_experts(model)(PROMPT).logits for model in (got, expected))
    torch.testing.assert_close(logits, of_values, rtol=1e-4, atol=1e-4)


def test_a_bias_of_the_checkpoint_alone_is_kept(floats, tmp_path):
    tensors, bias = load_file(floats / "model.safetensors"), torch.arange(64.0)
    path = "model.layers.0.self_attn.q_proj"
    parts, _ = gptq(tensors.pop(f"{path}.weight"))
    tensors |= {f"{path}.{leaf}": part for leaf, part in (parts | {"bias": bias}).items()}
    model = load_causal_lm(write(tmp_path / "stored", tensors, floats, quantization_config=FORMATS[gptq][0]))
    assert model.get_submodule(path).bias.equal(bias)


def test_modelopt_has_a_file_for_its_settings(floats, tmp_path):
    stored, dequantized = {}, load_file(floats / "model.safetensors")
    path = "model.layers.1.mlp.experts.0.up_proj"
    parts, dequantized[f"{path}.weight"] = float8_by_tensor(dequantized[f"{path}.weight"])
    stored = dequantized | {f"{path}.{leaf}": part for leaf, part in parts.items()}
    folder = write(tmp_path / "stored", stored, floats)
    with pytest.raises(ValueError, match=f"{path}.weight: got F8_E4M3, but config.json has no quantization_config"):
        load_causal_lm(folder)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    got, expected = load_causal_lm(folder), load_causal_lm(write(tmp_path / "dequantized", dequantized, floats))
    for (name, a), (_, b) in zip(got.named_parameters(), expected.named_parameters(), strict=True):
        assert a.equal(b), name


@pytest.mark.parametrize(
    "settings, leaf, message",
    [
        ({"quant_method": "new"}, None, "quantization_config: got {'quant_method': 'new'}, which is not supported"),
        ({"quant_method": "higgs"}, None, "got {'quant_method': 'higgs'}, which is not supported"),
        (
            COMPRESSED | {"format": "int-quantized", "transform_config": {"config_groups": {"u": {}}}},
            None,
            "transform_config",
        ),
        (
            {"quant_method": "quark"},
            "weight_scale",
            "model.layers.0.mlp.up_proj: .*got a weight of torch.float32, expected",
        ),
        (None, "weight_scale", "unexpected tensors for .*: model.layers.0.mlp.up_proj.weight_scale"),
        (
            {"quant_method": "fp8"},
            "pre_quant_scale",
            "unexpected tensors for .*: model.layers.0.mlp.up_proj.pre_quant_scale",
        ),
    ],
)
def test_a_quantization_that_cannot_be_read_is_refused(floats, settings, leaf, message, tmp_path):
    tensors = load_file(floats / "model.safetensors")
    if leaf:
        tensors[f"model.layers.0.mlp.up_proj.{leaf}"] = torch.ones(1)
    folder = write(tmp_path / "stored", tensors, floats, **{"quantization_config": settings} if settings else {})
    with pytest.raises(ValueError, match=message):
        load_causal_lm(folder)
    if leaf is None:  # the settings alone tell
        assert re.search(message, survey(folder).obstacle)


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
