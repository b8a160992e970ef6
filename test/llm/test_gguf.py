"""GGUF files as checkpoints, against the weights that the package `gguf` dequantizes."""

import re

import gguf
import numpy as np
import pytest
import small_llm
import torch
import transformers as hf
from executorch_mlx.custom_ops.packing import dequantize
from executorch_mlx.llm.export.checkpoints.gguf import GGUFCheckpoint
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.gguf.blocks import EXACT, packed_tensor
from executorch_mlx.llm.export.packed import MLXEmbedding, MLXExperts, MLXLinear
from executorch_mlx.llm.export.survey import survey
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
SMALL_16 = SMALL | dict(head_dim=16)  # for models without a size of heads in their config
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
GEMMA = dict(query_pre_attn_scalar=32, sliding_window=8, tie_word_embeddings=True)
WINDOWS = dict(num_hidden_layers=4, sliding_window=8)
SCALES = dict(attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0)
SCALE_KEYS = {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2}
QWEN_EXPERT_KEYS = EXPERT_KEYS | {"expert_feed_forward_length": 64}
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
# GGUF's architecture → model class, config, and the metadata besides that of all architectures.
MODELS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL), {}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL_16), {}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL, tie_word_embeddings=True), {}),
    "qwen3moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**SMALL, **EXPERTS), QWEN_EXPERT_KEYS),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**SMALL, **GEMMA), {"attention.sliding_window": 8}),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**SMALL, **GEMMA), {"attention.sliding_window": 8}),
    # As for Phi-4, whose window is 0.
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config(**SMALL_16), {"attention.sliding_window": 0}),
}
# The same for architectures that differ from the ones above in their names and in the config.
MORE_MODELS = {
    "arcee": (hf.ArceeForCausalLM, hf.ArceeConfig(**SMALL), {}),
    "cohere2": (
        hf.Cohere2ForCausalLM,
        hf.Cohere2Config(**SMALL_16 | WINDOWS, logit_scale=0.5),
        {"logit_scale": 0.5, "attention.sliding_window": 8},
    ),
    "cohere2, with a number for the pattern of windows": (
        hf.Cohere2ForCausalLM,
        hf.Cohere2Config(
            **SMALL_16 | WINDOWS, logit_scale=0.5, layer_types=["sliding_attention", "full_attention"] * 2
        ),
        {"logit_scale": 0.5, "attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
    ),
    "command-r": (hf.CohereForCausalLM, hf.CohereConfig(**SMALL_16, logit_scale=0.5), {"logit_scale": 0.5}),
    "ernie4_5": (hf.Ernie4_5ForCausalLM, hf.Ernie4_5Config(**SMALL, use_bias=True), {}),
    "exaone4": (
        hf.Exaone4ForCausalLM,
        hf.Exaone4Config(**SMALL | WINDOWS, sliding_window_pattern=2),
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 2},
    ),
    "exaone4, without windows": (
        hf.Exaone4ForCausalLM,
        hf.Exaone4Config(**SMALL | dict(num_hidden_layers=4), sliding_window=None, layer_types=["full_attention"] * 4),
        {},
    ),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig(**SMALL), {}),
    "glm4": (hf.Glm4ForCausalLM, hf.Glm4Config(**SMALL, partial_rotary_factor=0.25), {"rope.dimension_count": 8}),
    "gpt-oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig(
            **SMALL,
            sliding_window=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=YARN | {"truncate": False},
        ),
        QWEN_EXPERT_KEYS | YARN_KEYS | {"attention.sliding_window": 8},
    ),
    "granite": (hf.GraniteForCausalLM, hf.GraniteConfig(**SMALL_16, **SCALES, attention_bias=True), SCALE_KEYS),
    "granitemoe": (
        hf.GraniteMoeForCausalLM,
        hf.GraniteMoeConfig(**SMALL_16, **SCALES, num_local_experts=4, num_experts_per_tok=2),
        SCALE_KEYS | EXPERT_KEYS,
    ),
    "hunyuan-dense": (hf.HunYuanDenseV1ForCausalLM, hf.HunYuanDenseV1Config(**SMALL), {}),
    "llama, with experts": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
        EXPERT_KEYS,
    ),
    "llama, with biases": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True), {}),
    "mistral3": (
        hf.Ministral3ForCausalLM,
        hf.Ministral3Config(
            **SMALL, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
        ),
        YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
    ),
    "nemotron": (
        hf.NemotronForCausalLM,
        hf.NemotronConfig(**SMALL, partial_rotary_factor=0.25),
        {"rope.dimension_count": 8},
    ),
    "olmo": (hf.OlmoForCausalLM, hf.OlmoConfig(**SMALL_16, clip_qkv=0.5), {"attention.clamp_kqv": 0.5}),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config(**SMALL_16), {}),
    "olmo2, with windows": (
        hf.Olmo3ForCausalLM,
        hf.Olmo3Config(
            **SMALL_16 | WINDOWS,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "sliding_attention": dict(rope_type="default", rope_theta=10000.0),
                "full_attention": YARN | dict(attention_factor=1.5),
            },
        ),
        YARN_KEYS
        | {
            "rope.scaling.yarn_attn_factor": 1.5,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, False] * 2,
        },
    ),
    "olmoe": (hf.OlmoeForCausalLM, hf.OlmoeConfig(**SMALL_16, num_experts=4, num_experts_per_tok=2), EXPERT_KEYS),
    "phi2": (hf.PhiForCausalLM, hf.PhiConfig(**SMALL_16, partial_rotary_factor=0.5), {"rope.dimension_count": 8}),
    "phi3, two kinds of factors": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config(
            **SMALL_16,
            sliding_window=None,
            partial_rotary_factor=0.5,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                short_factor=[1.0, 1.5, 2.0, 2.5],
                long_factor=[2.0] * 4,
                original_max_position_embeddings=32,
                attention_factor=1.5,
                partial_rotary_factor=0.5,
            ),
        ),
        {"rope.dimension_count": 8, "rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.5},
    ),
    "qwen2moe": (
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig(**SMALL_16 | EXPERTS | dict(norm_topk_prob=False, shared_expert_intermediate_size=96)),
        QWEN_EXPERT_KEYS | {"expert_shared_feed_forward_length": 96},
    ),
    "qwen3vl": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL), {}),
    "seed_oss": (hf.SeedOssForCausalLM, hf.SeedOssConfig(**SMALL), {}),
    "smollm3": (hf.SmolLM3ForCausalLM, hf.SmolLM3Config(**SMALL_16 | dict(num_hidden_layers=4)), {}),
    "stablelm": (
        hf.StableLmForCausalLM,
        hf.StableLmConfig(**SMALL_16, partial_rotary_factor=0.25, use_qkv_bias=True),
        {"rope.dimension_count": 4},
    ),
    "starcoder2": (hf.Starcoder2ForCausalLM, hf.Starcoder2Config(**SMALL_16), {}),
}
# Architectures for which llama.cpp reorders rows of the query and key projections, or adds 1 to the weights of norms.
PERMUTED = ("llama", "arcee", "granite", "granitemoe", "mistral3", "olmo", "smollm3")
OFFSET_NORMS = ("gemma", "gemma2", "gemma3", "nemotron")
# Parts of names in transformers → the parts that the package `gguf` knows.
KNOWN_NAMES = {"block_sparse_moe.router": "mlp.gate", "mlp.router": "mlp.gate"}
EXPERTS_NAME = re.compile(r"layers\.(\d+)\..*\.experts\.(gate_up|down)_proj(_bias)?$")
TOKENS = torch.tensor([[5, 17, 100, 3, 77, 9, 150, 12, 60, 33, 2, 8]])


def write_gguf(path, architecture, type_, parts=1, **metadata):
    """Write a random model as llama.cpp stores it. Return the model with the weights of the file, dequantized.

    If `parts` is not 1, a file has at most 20 tensors.
    """
    model_class, config, special = (MODELS | MORE_MODELS)[architecture]
    architecture = architecture.split(",")[0]
    torch.manual_seed(0)
    model = model_class(config).eval()
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=0 if parts == 1 else 20)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        settings = ("layer_norm_eps", "norm_epsilon", "norm_eps")
        epsilon = next((getattr(config, name) for name in settings if hasattr(config, name)), 1e-5)  # that of OLMo
        writer.add_layer_norm_eps(epsilon)
    writer.add_key_length(config.head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(1)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
    for key, value in (special | metadata).items():
        add[type(value)](f"{architecture}.{key}", value)
    for name, factors in rope.items():
        if name in ("short_factor", "long_factor"):
            writer.add_tensor(f"rope_factors_{name.split('_')[0]}.weight", np.array(factors, np.float32))
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), config.num_hidden_layers
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
        is_transposed = architecture == "gpt-oss" and parameter.dim() == 3
        values = parameter.data.mT if is_transposed else parameter.data
        if parameter.dim() > 1 and "gate.weight" not in name and "router" not in name:  # routers stay float32
            values = torch.from_numpy(gguf.dequantize(_quantized(values, type_), type_))
            parameter.data = (values.mT if is_transposed else values).clone()
            if type_ == Type.NVFP4 and "embed_tokens" not in name and "lm_head" not in name:
                parameter.data *= _factors(values)
        _write_tensor(writer, names, architecture, name, values, type_)
    write_and_close(writer)
    return model


def write_and_close(writer):
    """Write the header, the metadata and the tensors of the file, and close it."""
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def _write_tensor(writer, names, architecture, name, values, type_):
    """Write a parameter of the model. `values` are those that the file has after quantization."""
    if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
        # transformers rotates rows i and i + D / 2 of a head of size D together. llama.cpp rotates neighbours: a file
        # has the rows in the order 0, D / 2, 1, D / 2 + 1, ...
        size = (MODELS | MORE_MODELS)[architecture][1].head_dim
        order = torch.arange(len(values)).view(-1, 2, size // 2).transpose(1, 2).flatten()
        values = values[order]
    if architecture in OFFSET_NORMS and name.endswith("norm.weight"):
        values = values + 1
    if expert := EXPERTS_NAME.search(name):
        prefix, leaf = f"blk.{expert[1]}.ffn_", "bias" if expert[3] else "weight"
        if architecture == "gpt-oss":
            halves = values[:, ::2], values[:, 1::2]
        else:
            halves = values.chunk(2, 1)
        written = {"down": values} if expert[2] == "down" else dict(zip(("gate", "up"), halves))
        for part, rows in written.items():
            _add(writer, f"{prefix}{part}_exps.{leaf}", rows, Type.F32 if expert[3] else type_)
        return
    for part, known in KNOWN_NAMES.items():
        name = name.replace(part, known)
    found = names.get_name(name, (".weight", ".bias"))
    found += "" if found.endswith((".weight", ".bias")) else ".weight"
    is_float = values.dim() == 1 or "ffn_gate_inp" in found
    _add(writer, found, values.squeeze(0) if "shexp" in found and is_float else values, Type.F32 if is_float else type_)


def _add(writer, name, values, type_):
    writer.add_tensor(name, _quantized(values, type_), raw_dtype=type_)
    if type_ == Type.NVFP4 and name.startswith("blk."):
        writer.add_tensor(name.replace(".weight", ".scale"), _factors(values).flatten().numpy())
        writer.add_tensor(name.replace(".weight", ".input_scale"), np.ones(1, np.float32))  # for other runtimes


def _quantized(values, type_):
    """Like `gguf.quantize`, which lacks NVFP4."""
    if type_ != Type.NVFP4:
        return gguf.quantize(np.ascontiguousarray(values), type_)
    groups = torch.as_tensor(values).unflatten(-1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    scaled = groups / scales.float().unsqueeze(-1)
    magnitudes = (scaled.abs().unsqueeze(-1) - torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])).abs().argmin(-1)
    q = (magnitudes + 8 * (scaled < 0)).to(torch.uint8)
    halves = (q[..., :8] | q[..., 8:] << 4).flatten(-2).unflatten(-1, (-1, 32))
    return torch.cat((scales.view(torch.uint8).unflatten(-1, (-1, 4)), halves), -1).flatten(-2).numpy()


def _factors(values):
    """Return the factors of a weight in NVFP4: one, or one for each expert."""
    return torch.arange(1.0, 1 + (len(values) if values.dim() == 3 else 1)).view(-1, *[1] * (values.dim() - 1)) * 1.5


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
        ("qwen3moe", Type.NVFP4),
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


@pytest.mark.parametrize("architecture", MORE_MODELS)
def test_logits_of_more_architectures(architecture, tmp_path):
    type_ = Type.MXFP4 if architecture == "gpt-oss" else Type.Q8_0
    reference = write_gguf(tmp_path / "m.gguf", architecture, type_)
    model = use_gathered_experts(load_causal_lm(tmp_path / "m.gguf"))
    assert type(model) is type(reference)
    found = survey(tmp_path / "m.gguf")
    assert found.obstacle is None and found.architecture == type(reference).__name__
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, reference(TOKENS).logits, rtol=1e-4, atol=1e-4)


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
    writer.add_tokenizer_pre("unheard-of")
    writer.add_token_list(["<s>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    write_and_close(writer)
    file = GGUFCheckpoint(tmp_path / "m.gguf")
    tokenizer = file.tokenizer()
    assert tokenizer.chat_template == "{{ bos_token }}a template of the file"
    assert tokenizer.encode("aba", add_special_tokens=False) == [3, 1]
    assert len(file.notes) == 1 and "tokenizer.ggml.pre: got unheard-of" in file.notes[0]


@pytest.mark.parametrize(
    "tokens, types, ends",
    [
        (["<eos>", "<end_of_turn>", "a"], [3, 4, 1], {0, 1}),
        (["<|endoftext|>", "<|im_end|>", "<|end|>"], [3, 3, 1], {0, 1}),
        (["<|return|>", "<|end|>", "<|call|>"], [3, 3, 3], {0, 2}),
    ],
)
def test_tokens_that_end_a_turn_end_an_answer(tokens, types, ends, tmp_path):
    """Files often name only the token that ends a text."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_eos_token_id(0)
    write_and_close(writer)
    assert GGUFCheckpoint(tmp_path / "m.gguf").end_ids() == ends


def write_tokenizer(path, architecture, rule, words, merges):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(["<s>", *words])
    writer.add_token_types([3] + [1] * len(words))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    write_and_close(writer)


# The rule → pieces of the text "ab12345": each is a token of its own.
@pytest.mark.parametrize(
    "rule, pieces",
    [
        ("glm4", ["ab", "123", "4", "5"]),
        ("deepseek-v3", ["ab", "123", "4", "5"]),
        ("smollm", ["ab", "1", "2", "3", "4", "5"]),
        ("exaone4", ["ab", "12345"]),
    ],
)
def test_a_tokenizer_follows_the_rule_of_the_file(rule, pieces, tmp_path):
    """transformers knows neither the architecture nor some of the rules."""
    digits = ["12", "123", "1234", "12345"]
    merges = ["a b", "1 2", "12 3", "123 4", "1234 5"]
    write_tokenizer(tmp_path / "m.gguf", "arcee", rule, [*"ab12345", "ab", *digits], merges)
    file = GGUFCheckpoint(tmp_path / "m.gguf")
    assert file.tokenizer().tokenize("ab12345") == pieces
    assert file.notes == []


TEXT = "It's 1234  中文 ABc\n x²+y!! \r\n"
# The rule → the pieces of `TEXT`, separated by `|`. They are those of the tokenizers of the models.
PIECES = {
    "deepseek-coder": "It|'|s| |1|2|3|4| | |中文| ABc|\n| x|²|+|y|!!| |\r|\n",
    "deepseek-llm": "It|'|s| |1|2|3|4|  |中文| ABc|\n| x|²|+|y|!!| |\r|\n",
    "kimi-k2": "It's| |123|4| | |中文| ABc|\n| x|²|+y|!!| \r\n",
}


@pytest.mark.parametrize("rule", PIECES)
def test_the_pieces_of_a_text(rule, tmp_path):
    write_tokenizer(tmp_path / "m.gguf", "deepseek2", rule, [*"ab", "ab"], ["a b"])
    pre_tokenizer = GGUFCheckpoint(tmp_path / "m.gguf").tokenizer().backend_tokenizer.pre_tokenizer
    pieces = [TEXT[begin:end] for _, (begin, end) in pre_tokenizer.pre_tokenize_str(TEXT)]
    assert "|".join(pieces) == PIECES[rule]


def test_falcon_splits_the_bytes_of_some_characters(tmp_path):
    """It splits digits after bytes became characters, some of which are digits: `³` stands for a byte of `γ`."""
    write_tokenizer(tmp_path / "m.gguf", "llama", "falcon", [*"ab", "ab"], ["a b"])
    file = GGUFCheckpoint(tmp_path / "m.gguf")
    pieces = file.tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str("It's 12345 γ $$")
    assert [piece for piece, _ in pieces] == ["It", "'", "s", "Ġ", "123", "45", "ĠÎ", "³", "Ġ", "$$"]
    assert file.notes == []


@pytest.mark.parametrize("rule, tokens", [("llama-bpe", [0, 5]), ("qwen2", [4, 3])])
def test_a_token_that_no_merges_lead_to(rule, tokens, tmp_path):
    """Texts for Llama 3 begin with the bos token."""
    write_tokenizer(tmp_path / "m.gguf", "llama", rule, [*"abc", "ab", "abc"], ["a b"])
    assert GGUFCheckpoint(tmp_path / "m.gguf").tokenizer().encode("abc") == tokens


@pytest.mark.parametrize("type_", EXACT, ids=lambda t: t.name)
def test_blocks_of_32_are_exact(type_, tmp_path):
    w = np.random.default_rng(0).normal(size=(48, 256)).astype(np.float32) * 0.05
    tensor = tensor_of(_quantized(w, type_), type_, tmp_path)
    packing = packed_tensor(tensor)
    values = dequantize(
        *packing.operands, *[None] * (3 - len(packing.operands)), packing.group_size, packing.bits, packing.mode
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
        ("qwen3", {"attention.layer_norm_rms_epsilon": "x"}, "m.gguf: the metadata describe no model of transformers"),
    ],
)
def test_unsupported_metadata_are_refused(architecture, metadata, message, tmp_path):
    write_gguf(tmp_path / "m.gguf", architecture, Type.F32, **metadata)
    with pytest.raises(ValueError, match=message):
        load_causal_lm(tmp_path / "m.gguf")
    assert re.search(message, survey(tmp_path / "m.gguf").obstacle)


def test_a_type_that_gguf_cannot_dequantize_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for add, value in ((writer.add_block_count, 1), (writer.add_embedding_length, 256), (writer.add_head_count, 1)):
        add(value)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(256, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((4, 292), np.uint8), raw_dtype=Type.Q8_K)
    write_and_close(writer)
    with pytest.raises(ValueError, match="token_embd.weight: got Q8_K"):
        load_causal_lm(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    write_and_close(writer)
    with pytest.raises(ValueError, match="general.architecture: got mamba, expected one of .*llama"):
        GGUFCheckpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"not a model" * 100])
def test_a_damaged_file_is_refused(damage, tmp_path):
    (tmp_path / "m.gguf").write_bytes(damage)
    with pytest.raises(ValueError, match="damaged or not a GGUF file"):
        load_causal_lm(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("llama.block_count", 2**31, "llama.block_count: got 2147483648 layers, expected 2, which have tensors"),
        ("llama.attention.head_count", 5, "describe no model of transformers: .*not a multiple of the number of"),
    ],
)
def test_a_damaged_number_is_refused(key, value, message, tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", Type.F16)
    at = path.read_bytes().index(key.encode()) + len(key) + 4  # behind the type of the value
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value.to_bytes(4, "little"))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_causal_lm(path)
