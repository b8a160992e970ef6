"""Checkpoints quantized by mlx-lm, against mlx-lm."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.llm.export.checkpoints.mlx import MLXFolder
from executorch_mlx.llm.export.checkpoints.open import open_checkpoint
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.packed import MLXEmbedding, MLXLinear
from executorch_mlx.llm.export.weights import load_causal_lm
from safetensors.torch import load_file, save_file

SMALL = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=200,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=None,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16)
TIED = dict(tie_word_embeddings=True, head_dim=32)
LINEAR = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    shared_expert_intermediate_size=64,
    layer_types=["linear_attention", "full_attention"],
    full_attention_interval=2,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_rope_head_dim=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
CONVOLUTION = dict(layer_types=["conv", "full_attention"], num_dense_layers=1)
# Name → model class, config class, changes of SMALL, how mlx-lm quantizes it (mode, bits, group size).
FOLDERS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, dict(attention_bias=True), "affine,8,64"),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, TIED, "affine,4,32"),
    "qwen3_mxfp4": (hf.Qwen3ForCausalLM, hf.Qwen3Config, TIED, "mxfp4,4,32"),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, EXPERTS, "affine,4,64"),
    # mlx-lm changes the tensors of these models: weights of norms and convolutions, latent attention, names.
    "qwen3_next": (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig, EXPERTS | LINEAR | dict(head_dim=32), "affine,8,32"),
    "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, LATENT, "affine,8,32"),
    "lfm2_moe": (hf.Lfm2MoeForCausalLM, hf.Lfm2MoeConfig, EXPERTS | CONVOLUTION, "affine,8,32"),
    # mlx-lm leaves out the biases of its routers.
    "ernie4_5_moe": (
        hf.Ernie4_5_MoeForCausalLM,
        hf.Ernie4_5_MoeConfig,
        dict(
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=64,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
            head_dim=16,
        ),
        "affine,8,32",
    ),
    # The numbers of its activation are tensors without axes.
    "apertus": (
        hf.ApertusForCausalLM,
        hf.ApertusConfig,
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4), mlp_bias=False, post_norm=False, qk_norm=True),
        "affine,4,32",
    ),
    "mistral3": (hf.MistralForCausalLM, hf.MistralConfig, dict(sliding_window=None), "affine,4,32"),
    # transformers computes its experts without the experts interface.
    "llama4": (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig,
        dict(
            num_hidden_layers=4,
            no_rope_layers=[1, 1, 1, 0],
            head_dim=16,
            attention_chunk_size=64,
            num_local_experts=4,
            intermediate_size_mlp=128,
            interleave_moe_layer_step=2,
        ),
        "affine,8,32",
    ),
}
MEDIA = {"mistral3", "llama4"}  # models for text and other media, of which mlx-lm keeps the language model
PROMPT, STEPS = [5, 17, 100, 3, 77, 9], 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name → the folder that mlx-lm wrote, and the logits and tokens of mlx-lm."""
    root, jobs = tmp_path_factory.mktemp("folders"), []
    for name, (model_class, config_class, changes, quantization) in FOLDERS.items():
        write_model(root / name, model_class, config_class(**SMALL | changes))
        jobs.append(f"{root / name}={quantization}")
    script = Path(__file__).with_name("mlx_lm_side.py")
    command = [sys.executable, script, json.dumps(PROMPT), str(STEPS), *jobs]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (root / name / "mlx", load_file(root / name / "answer.safetensors")) for name in FOLDERS}


def write_model(folder, model_class, config):
    torch.manual_seed(0)
    model = model_class(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():  # such as the biases of a router
            torch.nn.init.normal_(buffer)
    model.save_pretrained(folder)
    # mlx-lm reads the names that checkpoints on the hub have.
    written = json.loads((folder / "config.json").read_text())
    written |= {"rope_theta": config.rope_parameters["rope_theta"], "rope_scaling": None}
    if "partial_rotary_factor" in config.rope_parameters:
        written["partial_rotary_factor"] = config.rope_parameters["partial_rotary_factor"]
    for experts in {"num_experts", "n_routed_experts"} & {*dir(config)}:
        written[experts] = getattr(config, experts)
    if folder.name in MEDIA:
        written = {"model_type": folder.name, "text_config": written}
        tensors = load_file(folder / "model.safetensors")
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written))


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_mlx_lm(folders, name):
    folder, answer = folders[name]
    assert isinstance(open_checkpoint(folder), MLXFolder)
    assert not isinstance(open_checkpoint(folder.parent), MLXFolder)
    model = use_gathered_experts(load_causal_lm(folder, dtype=torch.float32))
    assert isinstance(model.model.embed_tokens, MLXEmbedding)
    assert isinstance(model.lm_head, MLXLinear)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, answer["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_greedy_equals_mlx_lm(folders, name, tmp_path):
    folder, answer = folders[name]
    exported = export_llm(load_causal_lm(folder), head=HeadConfig.minimal(), max_context_len=len(PROMPT) + STEPS)
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    llm = LLM.load(tmp_path / "model.pte")
    tokens = llm.generate(PROMPT, max_new_tokens=STEPS).result().tokens
    assert len(set(tokens)) > 5
    assert tokens == answer["tokens"].tolist()


def test_a_tied_head_shares_the_weights_of_the_embedding(folders):
    model = load_causal_lm(folders["qwen3"][0])
    embedding, head = model.model.embed_tokens, model.lm_head
    for name in ("words", "scales", "biases"):
        assert getattr(head, name) is getattr(embedding, name)


def test_a_checkpoint_may_have_several_files(folders, tmp_path):
    source = folders["qwen3"][0]
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = sorted(load_file(source / "model.safetensors").items())
    for part, file in enumerate(("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")):
        save_file(dict(tensors[part::2]), tmp_path / file)
    whole, split = load_causal_lm(source), load_causal_lm(tmp_path)
    for (name, a), (_, b) in zip(whole.state_dict().items(), split.state_dict().items(), strict=True):
        assert a.equal(b), name


def test_dtype_casts_only_the_parameters(folders):
    model = load_causal_lm(folders["qwen3"][0], dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.int32}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model(torch.tensor([PROMPT])).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.norm.weight"), "missing tensors for LlamaForCausalLM: model.norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "lm_head: expected both a weight and its scales"),
        (lambda t: t.update(spare=torch.zeros(1)), "unexpected tensors for LlamaForCausalLM: spare"),
        (lambda t: t.update({"lm_head.scales": torch.zeros(200, 3)}), "expected a multiple of the group size"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight: got \[3\], expected \[64\]"),
        (lambda t: t.update({"model.other.scales": torch.zeros(2, 3)}), "LlamaForCausalLM has no module model.other"),
    ],
)
def test_a_checkpoint_that_does_not_match_is_refused(folders, change, message, tmp_path):
    source = folders["llama"][0]
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ValueError, match=message):
        load_causal_lm(tmp_path)


def test_experts_with_a_global_scale(tmp_path):
    """MLX multiplies by such weights on a GPU only, but converts them on every device. They become floats."""
    torch.manual_seed(0)
    model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SMALL | EXPERTS, mlp_only_layers=[0], initializer_range=0.15))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    path = "model.layers.1.mlp"
    for part in ("gate_proj", "up_proj", "down_proj"):
        weights = [tensors.pop(f"{path}.experts.{expert}.{part}.weight") for expert in range(4)]
        tensors[f"{path}.switch_mlp.{part}"] = torch.stack(weights)
    save_file(tensors, tmp_path / "floats.safetensors")
    done = subprocess.run([sys.executable, "-c", GLOBAL_SCALES, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = load_causal_lm(tmp_path, dtype=torch.float32)
    values = load_file(tmp_path / "values.safetensors")
    joined = torch.cat([values[f"{path}.switch_mlp.{part}"] for part in ("gate_proj", "up_proj")], 1)
    experts = use_gathered_experts(loaded).model.layers[1].mlp.experts
    torch.testing.assert_close(experts.gate_up_proj, joined)
    torch.testing.assert_close(experts.down_proj, values[f"{path}.switch_mlp.down_proj"])


# Quantizes the experts in floats.safetensors to NVFP4 with a `global_scale` for each expert, as mlx-lm does, and writes
# the values of the quantized weights.
GLOBAL_SCALES = """
import sys, mlx.core as mx
folder = sys.argv[1]
tensors, values = mx.load(f"{folder}/floats.safetensors"), {}
for name in [name for name in tensors if "switch_mlp" in name]:
    weights = tensors.pop(name)
    limits = mx.abs(weights).max(axis=(-2, -1))
    parts = [mx.quantize(w, 16, 4, mode="nvfp4", global_scale=x) for w, x in zip(weights, limits)]
    values[name] = mx.stack([mx.dequantize(q, s, group_size=16, bits=4, mode="nvfp4", global_scale=x)
                             for (q, s), x in zip(parts, limits)])
    packed = {leaf: mx.stack(part) for leaf, part in zip(("weight", "scales"), zip(*parts))}
    tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in (packed | {"global_scale": limits}).items()}
mx.save_safetensors(f"{folder}/model.safetensors", tensors, {"format": "mlx"})
mx.save_safetensors(f"{folder}/values.safetensors", values)
"""


def test_weights_that_mlx_lm_multiplied_are_refused(tmp_path):
    config = hf.FalconH1Config(**SMALL, mamba_n_heads=4, mamba_d_head=32, mamba_d_ssm=128, mamba_d_state=16)
    hf.FalconH1ForCausalLM(config).save_pretrained(tmp_path)
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(
        ValueError, match="got weights of kind falcon_h1 from mlx-lm, expected a Hugging Face checkpoint"
    ):
        load_causal_lm(tmp_path)
