"""GGUF files as checkpoints, against the weights that the package `gguf` dequantizes."""

import gguf
import numpy as np
import pytest
import small_llm
import torch
import transformers as hf
from executorch_mlx.custom_ops.packing import dequantize
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.gguf_blocks import EXACT, packed_tensor
from executorch_mlx.llm.export.gguf_file import GGUFFile
from executorch_mlx.llm.export.packed import MLXEmbedding, MLXExperts, MLXLinear
from executorch_mlx.llm.export.weights import load_causal_lm
from gguf import GGMLQuantizationType as Type

SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=200,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
GEMMA = dict(query_pre_attn_scalar=32, sliding_window=8, tie_word_embeddings=True)
# GGUF's architecture → model class, config.
MODELS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL)),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL | dict(head_dim=16))),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL, tie_word_embeddings=True)),
    "qwen3moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**SMALL, **EXPERTS)),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**SMALL, **GEMMA)),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**SMALL, **GEMMA)),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config(**SMALL | dict(head_dim=16))),
}
TOKENS = torch.tensor([[5, 17, 100, 3, 77, 9, 150, 12, 60, 33, 2, 8]])


def write_gguf(path, architecture, type_, parts=1, **metadata):
    """Write a random model as llama.cpp stores it. Return the model with the weights of the file, dequantized.

    If `parts` is not 1, a file has at most 20 tensors.
    """
    model_class, config = MODELS[architecture]
    torch.manual_seed(0)
    model = model_class(config).eval()
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=0 if parts == 1 else 20)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(getattr(config, "head_dim", 16))
    writer.add_rope_freq_base(MODELS[architecture][1].rope_parameters.get("rope_theta", 1e6))
    if architecture == "qwen3moe":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(64)
    if "gemma" in architecture:
        writer.add_sliding_window(8)
    writer.add_eos_token_id(1)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
    if architecture == "phi3":  # as for Phi-4
        writer.add_sliding_window(0)
    for key, value in metadata.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{architecture}.{key}", value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
        _write_tensor(writer, names, architecture, name, parameter, type_)
    write_and_close(writer)
    return model


def write_and_close(writer):
    """Write the header, the metadata and the tensors of the file, and close it."""
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def _write_tensor(writer, names, architecture, name, parameter, type_):
    """Write a parameter, and set it to the values that the file has after quantization."""
    values = parameter.data
    if parameter.dim() > 1 and "mlp.gate." not in name:  # `mlp.gate` is the router of the experts, which stays float32
        quantized = gguf.quantize(values.numpy(), type_)
        parameter.data = torch.from_numpy(gguf.dequantize(quantized, type_)).clone()
        values = parameter.data
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        # transformers rotates rows i and i + D / 2 of a head of size D together. llama.cpp rotates neighbours, so a file
        # has the rows in the order 0, D / 2, 1, D / 2 + 1, ...
        order = torch.arange(len(values)).view(-1, 2, 16).transpose(1, 2).flatten()
        values = values[order]
    if "gemma" in architecture and parameter.dim() == 1:
        values = values + 1
    if "gate_up_proj" in name and architecture == "qwen3moe":
        layer = name.split(".")[2]
        for part, rows in zip(("gate", "up"), values.chunk(2, 1)):
            _add(writer, f"blk.{layer}.ffn_{part}_exps.weight", rows, type_)
        return
    found = names.get_name(name, (".weight", ".bias"))
    found += ".weight" if name.endswith("experts.down_proj") else ""
    _add(writer, found, values, Type.F32 if parameter.dim() == 1 or "mlp.gate." in name else type_)


def _add(writer, name, values, type_):
    data = gguf.quantize(np.ascontiguousarray(values.numpy()), type_)
    writer.add_tensor(name, data, raw_dtype=type_)


@pytest.mark.parametrize(
    "architecture, type_",
    [
        ("llama", Type.Q4_0),
        ("llama", Type.Q4_1),
        ("llama", Type.Q8_0),
        ("llama", Type.F32),
        ("qwen2", Type.Q5_1),
        ("qwen3", Type.Q8_0),
        ("qwen3moe", Type.Q4_0),
        ("qwen3moe", Type.MXFP4),
        ("gemma2", Type.Q8_0),
        ("gemma3", Type.Q4_1),
        ("phi3", Type.Q5_0),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_logits_equal_those_of_the_dequantized_weights(architecture, type_, tmp_path):
    reference = write_gguf(tmp_path / "m.gguf", architecture, type_)
    model = use_gathered_experts(load_causal_lm(tmp_path / "m.gguf"))
    packed = [m for m in model.modules() if isinstance(m, (MLXLinear, MLXExperts, MLXEmbedding))]
    assert bool(packed) == (type_ != Type.F32)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, reference(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert model.generation_config.eos_token_id == [1, 7]


def test_a_model_may_have_several_files(tmp_path):
    reference = write_gguf(tmp_path / "m.gguf", "llama", Type.F32, parts=2)
    first, last = sorted(tmp_path.iterdir())
    for path in (first, last):
        with torch.no_grad():
            torch.testing.assert_close(
                load_causal_lm(path)(TOKENS).logits, reference(TOKENS).logits, rtol=1e-4, atol=1e-4
            )
    last.unlink()
    with pytest.raises(ValueError, match="m-00002-of-00002.gguf: this part of the model is missing"):
        load_causal_lm(first)


def test_the_tokenizer_is_that_of_the_file(tmp_path):
    small_llm.tokenizer("a template of the folder").save_pretrained(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(1)
    writer.add_string("tokenizer.chat_template", "{{ bos_token }}a template of the file")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-llm")
    writer.add_token_list(["<s>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    write_and_close(writer)
    file = GGUFFile(tmp_path / "m.gguf")
    tokenizer = file.tokenizer()
    assert tokenizer.chat_template == "{{ bos_token }}a template of the file"
    assert tokenizer.encode("aba", add_special_tokens=False) == [3, 1]
    assert len(file.notes) == 1 and "tokenizer.ggml.pre: got deepseek-llm" in file.notes[0]


@pytest.mark.parametrize("type_", EXACT, ids=lambda t: t.name)
def test_blocks_of_32_are_exact(type_, tmp_path):
    w = np.random.default_rng(0).normal(size=(48, 256)).astype(np.float32) * 0.05
    tensor = tensor_of(gguf.quantize(w, type_), type_, tmp_path)
    packing = packed_tensor(tensor)
    values = dequantize(
        *packing.operands, *[None] * (3 - len(packing.operands)), 32, packing.bits, packing.mode
    ).numpy()
    assert (values == gguf.dequantize(tensor.data, type_)).all() and packing.squared_error == 0


# The offsets of the float16 scales in the bytes of a block, and an upper bound of the relative error.
K_QUANTS = {
    Type.Q2_K: ([80, 82], 0.06),
    Type.Q3_K: ([108], 0.08),
    Type.Q4_K: ([0, 2], 5e-4),
    Type.Q5_K: ([0, 2], 5e-4),
    Type.Q6_K: ([208], 6e-3),
}


@pytest.mark.parametrize("type_", K_QUANTS, ids=lambda t: t.name)
def test_k_quants_report_their_error(type_, tmp_path):
    offsets, limit = K_QUANTS[type_]
    random = np.random.default_rng(0)
    size = gguf.GGML_QUANT_SIZES[type_][1]
    blocks = random.integers(0, 256, (48, 2, size), dtype=np.uint8)
    for offset in offsets:
        scales = random.uniform(1e-3, 1e-2, (48, 2, 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = scales.view(np.uint8)
    tensor = tensor_of(blocks.reshape(48, -1), type_, tmp_path)
    packing = packed_tensor(tensor)
    expected = torch.from_numpy(gguf.dequantize(tensor.data, type_))
    error = (dequantize(*packing.operands, 32, packing.bits) - expected).norm() / expected.norm()
    assert 0 < error < limit
    assert (packing.squared_error / packing.squared_norm) ** 0.5 == pytest.approx(float(error), rel=1e-3)


def tensor_of(data, type_, folder):
    writer = gguf.GGUFWriter(folder / "tensor.gguf", "llama")
    writer.add_tensor("w", data, raw_dtype=type_)
    write_and_close(writer)
    return gguf.GGUFReader(folder / "tensor.gguf").tensors[0]


def test_linear_scaling_of_the_rotary_embedding(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", Type.F32, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    model = load_causal_lm(tmp_path / "m.gguf")
    plain = hf.LlamaForCausalLM(MODELS["llama"][1])
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq / 4)


@pytest.mark.parametrize(
    "architecture, metadata, message",
    [
        ("llama", {"rope.scaling.type": "yarn"}, "rope.scaling.type yarn"),
        ("llama", {"rope.dimension_count": 8.0}, "rope.dimension_count 8"),
    ],
)
def test_unsupported_rope_metadata_is_refused(architecture, metadata, message, tmp_path):
    write_gguf(tmp_path / "m.gguf", architecture, Type.F32, **metadata)
    with pytest.raises(ValueError, match=message):
        load_causal_lm(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    write_and_close(writer)
    with pytest.raises(ValueError, match="general.architecture: got mamba, expected one of .*llama"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"not a model" * 100])
def test_a_damaged_file_is_refused(damage, tmp_path):
    (tmp_path / "m.gguf").write_bytes(damage)
    with pytest.raises(ValueError, match="damaged or not a GGUF file"):
        load_causal_lm(tmp_path / "m.gguf")
