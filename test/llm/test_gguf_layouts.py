"""GGUF files of models whose tensors llama.cpp reorders, joins or divides, against transformers.

`LAYOUTS` follows the scripts of llama.cpp that convert models of transformers.
"""

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from executorch_mlx.llm.export.checkpoints.gguf import GGUFCheckpoint
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.packed import MLXExperts, MLXLinear
from executorch_mlx.llm.export.weights import load_causal_lm
from gguf import GGMLQuantizationType as Type
from test_gguf import SCALE_KEYS, SCALES, TOKENS, YARN, YARN_KEYS, write_and_close

SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=200,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
)
SMALL_16 = {name: value for name, value in SMALL.items() if name != "head_dim"}
KEYS = {
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 4,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 32,
    "attention.value_length": 32,
}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
SHARED = dict(shared_expert_intermediate_size=32)
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
ROUTED = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
)
ROUTED_KEYS = EXPERT_KEYS | {
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_group_count": 2,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
}
LINEAR = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=32)
LINEAR_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "full_attention_interval": 4,
    "rope.dimension_count": 8,
}
LATENT = dict(num_key_value_heads=4, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32)
LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 80,
    "attention.value_length": 64,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}
CONVOLUTIONS = dict(layer_types=["conv", "full_attention", "conv", "full_attention"], norm_eps=1e-6)
CONVOLUTION_KEYS = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 2], "attention.key_length": 16}
LAYERS = ["sliding_attention", "full_attention"] * 2
WINDOW_KEYS = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 2}
PER_LAYER = dict(vocab_size_per_layer_input=200, hidden_size_per_layer_input=32, num_kv_shared_layers=2)
PER_LAYER_KEYS = {"embedding_length_per_layer_input": 32, "attention.shared_kv_layers": 2}
GEMMA4 = dict(
    global_head_dim=64,
    sliding_window=8,
    layer_types=LAYERS,
    final_logit_softcapping=5.0,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
    },
)
GEMMA4_KEYS = WINDOW_KEYS | {
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
    "rope.freq_base_swa": 500.0,
    "final_logit_softcapping": 5.0,
}
MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=2, mamba_expand=2)
MAMBA_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "attention.head_count_kv": [0, 2, 0, 2],
    "attention.key_length": 16,
    "rope.scaling.finetuned": False,
    "expert_shared_feed_forward_length": 32,
}
MOE_BIAS = dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=1, moe_layer_start_index=1)

# GGUF's architecture → model class, config, the metadata besides KEYS.
MODELS = {
    "qwen35": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig(**SMALL, **LINEAR), LINEAR_KEYS),
    "qwen35moe": (
        hf.Qwen3_5MoeForCausalLM,
        hf.Qwen3_5MoeTextConfig(**SMALL, **LINEAR, **EXPERTS, **SHARED),
        LINEAR_KEYS | EXPERT_KEYS | {"expert_shared_feed_forward_length": 32},
    ),
    "qwen3next": (
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig(**SMALL, **LINEAR, **EXPERTS, **SHARED),
        LINEAR_KEYS | EXPERT_KEYS | {"expert_shared_feed_forward_length": 32},
    ),
    "lfm2": (
        hf.Lfm2ForCausalLM,
        hf.Lfm2Config(**SMALL_16, **CONVOLUTIONS, block_auto_adjust_ff_dim=False),
        CONVOLUTION_KEYS,
    ),
    "lfm2moe": (
        hf.Lfm2MoeForCausalLM,
        hf.Lfm2MoeConfig(**SMALL_16, **CONVOLUTIONS, **EXPERTS, num_dense_layers=1),
        CONVOLUTION_KEYS | EXPERT_KEYS | {"leading_dense_block_count": 1},
    ),
    "deepseek2": (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(
            **SMALL_16 | LATENT, **ROUTED, q_lora_rank=64, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0)
        ),
        LATENT_KEYS | ROUTED_KEYS | YARN_KEYS | {"attention.q_lora_rank": 64, "rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "deepseek2, without a correction": (
        hf.DeepseekV2ForCausalLM,
        hf.DeepseekV2Config(**SMALL_16 | LATENT, **ROUTED | dict(n_group=1, topk_group=1), q_lora_rank=None),
        LATENT_KEYS
        | ROUTED_KEYS
        | {"expert_group_count": 1, "expert_group_used_count": 1, "expert_weights_norm": False},
    ),
    "glm4moe": (
        hf.Glm4MoeForCausalLM,
        hf.Glm4MoeConfig(**SMALL, **ROUTED, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5),
        ROUTED_KEYS | {"rope.dimension_count": 16},
    ),
    "dots1": (hf.Dots1ForCausalLM, hf.Dots1Config(**SMALL, **ROUTED, norm_topk_prob=True), ROUTED_KEYS),
    "ernie4_5-moe": (
        hf.Ernie4_5_MoeForCausalLM,
        hf.Ernie4_5_MoeConfig(**SMALL, **MOE_BIAS, use_bias=False),
        EXPERT_KEYS | {"expert_shared_count": 1, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
    ),
    "hunyuan-moe": (
        hf.HunYuanMoEV1ForCausalLM,
        hf.HunYuanMoEV1Config(**SMALL | dict(intermediate_size=64), num_experts=4, moe_topk=2),
        EXPERT_KEYS | {"feed_forward_length": 64, "expert_shared_count": 1},
    ),
    "minimax-m2": (
        hf.MiniMaxM2ForCausalLM,
        hf.MiniMaxM2Config(
            **SMALL | dict(intermediate_size=64), num_local_experts=4, num_experts_per_tok=2, partial_rotary_factor=0.5
        ),
        EXPERT_KEYS | {"feed_forward_length": 64, "rope.dimension_count": 16},
    ),
    "granitehybrid": (
        hf.GraniteMoeHybridForCausalLM,
        hf.GraniteMoeHybridConfig(
            **SMALL_16 | dict(intermediate_size=64),
            **MAMBA,
            **SCALES,
            layer_types=["mamba", "attention"] * 2,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
        ),
        MAMBA_KEYS | SCALE_KEYS | EXPERT_KEYS | {"feed_forward_length": 64},
    ),
    "gemma3n": (
        hf.Gemma3nForCausalLM,
        hf.Gemma3nTextConfig(
            **SMALL,
            **PER_LAYER,
            sliding_window=8,
            layer_types=LAYERS,
            laurel_rank=32,
            activation_sparsity_pattern=[0.75, 0.0, 0.0, 0.0],
        ),
        WINDOW_KEYS
        | PER_LAYER_KEYS
        | {
            "altup.active_idx": 0,
            "altup.num_inputs": 4,
            "activation_sparsity_scale": [0.6744897, *[float("-inf")] * 3],
        },
    ),
    "gemma4": (
        hf.Gemma4ForCausalLM,
        hf.Gemma4TextConfig(**SMALL, **GEMMA4, **PER_LAYER, use_double_wide_mlp=True),
        GEMMA4_KEYS | PER_LAYER_KEYS | {"feed_forward_length": [96, 96, 192, 192]},
    ),
    "gemma4, with experts": (
        hf.Gemma4ForCausalLM,
        hf.Gemma4TextConfig(
            **SMALL,
            **GEMMA4,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=64,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        ),
        GEMMA4_KEYS
        | EXPERT_KEYS
        | {
            "embedding_length_per_layer_input": 0,
            "attention.shared_kv_layers": 0,
            "attention.head_count_kv": [2, 1] * 2,
        },
    ),
}
OFFSET_NORMS = ("qwen35", "qwen35moe", "qwen3next")
# Tensors that stay floats: those of the file whose names contain one of these parts.
FLOATS = ("ffn_gate_inp", "conv", "ssm_a", "ssm_d", "ssm_norm", "norm", "attn_k_b", "attn_v_b", "altup", "inp_gate")
# Parts of the names in transformers of matrices that are not quantized.
UNQUANTIZED = ("gate.weight", "router", "kv_b_proj", "altup")


def tiled(values, config, size, first=0):
    """Order the heads of the rows from `first` on: the first value heads of all key heads come first."""
    keys = config.linear_num_key_heads
    heads = values[first:].unflatten(0, (keys, -1, size)).transpose(0, 1).flatten(0, 2)
    return torch.cat((values[:first], heads))


def qwen3_next(x, c):
    keys, values = c.linear_key_head_dim, c.linear_value_head_dim * c.linear_num_value_heads // c.linear_num_key_heads
    *qkv, z = x.unflatten(0, (c.linear_num_key_heads, -1)).split([keys, keys, values, values], 1)
    return {"attn_qkv.weight": torch.cat([part.flatten(0, 1) for part in qkv]), "attn_gate.weight": z.flatten(0, 1)}


def latents(x, c):
    keys, values = x.unflatten(0, (c.num_attention_heads, -1)).split([c.qk_nope_head_dim, c.v_head_dim], 1)
    return {"attn_k_b.weight": keys.mT, "attn_v_b.weight": values}


def rows_of_keys(c):
    return 2 * c.linear_num_key_heads * c.linear_key_head_dim


LINEAR_LAYOUT = {
    "A_log": lambda x, c: {"ssm_a": -x.exp()},
    "dt_bias": lambda x, c: {"ssm_dt.bias": x},
    "linear_attn.conv1d.weight": lambda x, c: {"ssm_conv1d.weight": x.squeeze(1)},
    "linear_attn.norm.weight": lambda x, c: {"ssm_norm.weight": x},
}
TILED_LAYOUT = {
    "A_log": lambda x, c: {"ssm_a": tiled(-x.exp(), c, 1)},
    "dt_bias": lambda x, c: {"ssm_dt.bias": tiled(x, c, 1)},
    "linear_attn.conv1d.weight": lambda x, c: {
        "ssm_conv1d.weight": tiled(x.squeeze(1), c, c.linear_value_head_dim, rows_of_keys(c))
    },
    "linear_attn.norm.weight": lambda x, c: {"ssm_norm.weight": x},
    "in_proj_qkv.weight": lambda x, c: {"attn_qkv.weight": tiled(x, c, c.linear_value_head_dim, rows_of_keys(c))},
    "in_proj_z.weight": lambda x, c: {"attn_gate.weight": tiled(x, c, c.linear_value_head_dim)},
    "in_proj_a.weight": lambda x, c: {"ssm_alpha.weight": tiled(x, c, 1)},
    "in_proj_b.weight": lambda x, c: {"ssm_beta.weight": tiled(x, c, 1)},
    "linear_attn.out_proj.weight": lambda x, c: {"ssm_out.weight": tiled(x.T, c, c.linear_value_head_dim).T},
}
CORRECTION = {"correction_bias": lambda x, c: {"exp_probs_b.bias": x.flatten()}}
# GGUF's architecture → the end of a name in transformers → a function of the tensor and the config that returns the
# tensors of the file. Their names lack `blk.N.`.
LAYOUTS = {
    "qwen35": TILED_LAYOUT,
    "qwen35moe": TILED_LAYOUT,
    "qwen3next": LINEAR_LAYOUT | {"in_proj_qkvz.weight": qwen3_next},
    "lfm2": {"conv.conv.weight": lambda x, c: {"shortconv.conv.weight": x.squeeze(1)}},
    "lfm2moe": {
        "conv.conv.weight": lambda x, c: {"shortconv.conv.weight": x.squeeze(1)},
        "expert_bias": lambda x, c: {"exp_probs_b.bias": x},
    },
    "deepseek2": {"kv_b_proj.weight": latents} | CORRECTION,
    "glm4moe": CORRECTION,
    "dots1": CORRECTION,
    "ernie4_5-moe": CORRECTION,
    "minimax-m2": CORRECTION | {"mlp.gate.weight": lambda x, c: {"ffn_gate_inp.weight": x}},
    "granitehybrid": {
        "A_log": lambda x, c: {"ssm_a": -x.exp()[:, None]},
        "mamba.D": lambda x, c: {"ssm_d": x[:, None]},
        "dt_bias": lambda x, c: {"ssm_dt.bias": x},
        "mamba.conv1d.weight": lambda x, c: {"ssm_conv1d.weight": x.squeeze(1)},
        "mamba.norm.weight": lambda x, c: {"ssm_norm.weight": x.unflatten(0, (c.mamba_n_groups, -1))},
        "input_linear.weight": lambda x, c: dict(zip(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), x.chunk(2))),
        "q_proj.weight": lambda x, c: {"attn_q.weight": neighbours(x, c.num_attention_heads)},
        "k_proj.weight": lambda x, c: {"attn_k.weight": neighbours(x, c.num_key_value_heads)},
        "router.weight": lambda x, c: {"ffn_gate_inp.weight": x},
    },
    "gemma4": {
        "layer_scalar": lambda x, c: {"layer_output_scale.weight": x},
        "router.scale": lambda x, c: {"ffn_gate_inp.scale": x},
        "per_expert_scale": lambda x, c: {"ffn_down_exps.scale": x},
    },
}


def neighbours(x, heads):
    """Put the rows i and i + D / 2 of a head side by side."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(path, name, type_, is_fused=False, **metadata):
    """Write a random model as llama.cpp stores it. Return the model with the weights of the file, dequantized."""
    model_class, config, keys = MODELS[name]
    architecture = name.split(",")[0]
    torch.manual_seed(0)
    model = model_class(config).eval()
    writer = gguf.GGUFWriter(path, architecture)
    add = {
        str: writer.add_string,
        float: writer.add_float32,
        bool: writer.add_bool,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    rope = getattr(config, "rope_parameters", None) or {}
    if theta := rope.get("full_attention", rope).get("rope_theta"):
        keys = keys | {"rope.freq_base": theta}
    for key, value in (KEYS | keys | metadata).items():
        add[type(value)](f"{architecture}.{key}", value)
    if architecture == "gemma4":  # a quarter of the head is rotated
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * 8 + [1e30] * 24, np.float32))
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    stacks = {}
    for full_name, tensor in model.state_dict().items():
        if full_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _fill(full_name, tensor)
        if tensor.dim() > 1 and tensor.shape[-1] % 32 == 0 and not any(part in full_name for part in UNQUANTIZED):
            values = gguf.dequantize(gguf.quantize(np.ascontiguousarray(tensor), type_), type_)
            tensor.copy_(torch.from_numpy(values))
        layer = full_name.split(".layers.")[-1].split(".")[0] if ".layers." in full_name else None
        for own_name, values in _in_file(full_name, tensor, config, architecture, names, is_fused).items():
            if "altup" in own_name and layer is None:
                stacks.setdefault(own_name, []).append(values)
                continue
            if architecture in OFFSET_NORMS and full_name.endswith("norm.weight") and "linear_attn" not in full_name:
                values = values + 1
            own_name = own_name if own_name.startswith("blk.") or layer is None else f"blk.{layer}.{own_name}"
            is_float = values.dim() == 1 or any(part in own_name for part in FLOATS)
            _add(writer, own_name, values, Type.F32 if is_float else type_)
    for own_name, matrices in stacks.items():
        _add(writer, own_name, torch.stack(matrices), Type.F32)
    write_and_close(writer)
    return model


def _fill(name, tensor):
    if name.endswith("A_log"):
        tensor.uniform_(-1, 1)
    elif name.endswith(("dt_bias", "correction_bias", "expert_bias")):
        torch.nn.init.normal_(tensor, std=0.3)
    else:
        torch.nn.init.normal_(tensor, mean=float(tensor.dim() == 1), std=0.15)


def _in_file(name, tensor, config, architecture, names, is_fused):
    """Return the names in the file → the tensors."""
    layout = LAYOUTS.get(architecture, {})
    for ending, function in layout.items():
        if name.endswith(ending):
            return function(tensor, config)
    if name.endswith(".experts.gate_up_proj"):
        if is_fused:
            return {"ffn_gate_up_exps.weight": tensor}
        return dict(zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), tensor.chunk(2, 1)))
    if name.endswith(".experts.down_proj"):
        return {"ffn_down_exps.weight": tensor}
    if "altup_" in name:
        return {"altup_unembd_proj.weight" if "unembed" in name else "altup_proj.weight": tensor}
    found = names.get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return {found if found.endswith((".weight", ".bias")) else f"{found}.weight": tensor}


def _add(writer, name, values, type_):
    values = values.squeeze(0) if "shexp" in name and len(values) == 1 else values
    data = gguf.quantize(np.ascontiguousarray(values.numpy()), type_)
    writer.add_tensor(name, data, raw_dtype=type_)


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


@pytest.mark.parametrize(
    "name, type_",
    [(name, Type.Q8_0) for name in MODELS] + [(name, Type.F32) for name in ("deepseek2", "qwen35")],
    ids=lambda v: getattr(v, "name", v),
)
def test_logits_equal_those_of_the_dequantized_weights(name, type_, tmp_path):
    reference = write_gguf(tmp_path / "m.gguf", name, type_)
    model = use_gathered_experts(load_causal_lm(tmp_path / "m.gguf"))
    assert type(model) is type(reference)
    packed = [path for path, module in model.named_modules() if isinstance(module, (MLXLinear, MLXExperts))]
    assert bool(packed) == (type_ != Type.F32)
    if name == "qwen35" and packed:
        assert "model.layers.0.linear_attn.out_proj" in packed
    torch.testing.assert_close(logits(model), logits(use_gathered_experts(reference)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3next", "gemma4, with experts"])
def test_gate_and_up_projections_of_experts_may_be_one_tensor(name, tmp_path):
    reference = write_gguf(tmp_path / "m.gguf", name, Type.Q8_0, is_fused=True)
    model = use_gathered_experts(load_causal_lm(tmp_path / "m.gguf"))
    torch.testing.assert_close(logits(model), logits(use_gathered_experts(reference)), rtol=1e-3, atol=1e-3)


def test_a_head_for_multi_token_prediction_is_left_out(tmp_path):
    path = tmp_path / "m.gguf"
    reference = write_gguf(path, "qwen35", Type.F32, block_count=4, nextn_predict_layers=0)
    count = len(gguf.GGUFReader(path).tensors)
    write_gguf(path, "qwen35", Type.F32, block_count=4, nextn_predict_layers=1)
    file = GGUFCheckpoint(path)
    assert len(file.file.tensors) == count and file.file.layer_count == 3
    model = file.load()
    assert file.notes == ["left out the head for multi-token prediction"]
    assert len(model.model.layers) == 3 and len(reference.model.layers) == 4


def test_values_that_differ_between_layers_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", "dots1", Type.F32, **{"attention.head_count_kv": [2, 2, 2, 4]})
    with pytest.raises(ValueError, match=r"dots1.attention.head_count_kv: got \[2, 2, 2, 4\], expected one number"):
        load_causal_lm(tmp_path / "m.gguf")
