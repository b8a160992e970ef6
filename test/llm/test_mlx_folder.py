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
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.packed import MLXEmbedding, MLXLinear
from executorch_mlx.llm.export.weights import is_mlx, load_causal_lm
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
# Name → model class, config class, changes of SMALL, how mlx-lm quantizes it (mode, bits, group size).
FOLDERS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, dict(attention_bias=True), "affine,8,64"),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, TIED, "affine,4,32"),
    "qwen3_mxfp4": (hf.Qwen3ForCausalLM, hf.Qwen3Config, TIED, "mxfp4,4,32"),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, EXPERTS, "affine,4,64"),
}
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
    model.save_pretrained(folder)
    # mlx-lm reads the names that checkpoints on the hub have.
    written = json.loads((folder / "config.json").read_text())
    written["rope_theta"] = config.rope_parameters["rope_theta"]
    if hasattr(config, "num_experts"):
        written["num_experts"] = config.num_experts
    (folder / "config.json").write_text(json.dumps(written))


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_mlx_lm(folders, name):
    folder, answer = folders[name]
    assert is_mlx(folder) and not is_mlx(folder.parent)
    model = use_gathered_experts(load_causal_lm(folder, dtype=torch.float32))
    assert isinstance(model.model.embed_tokens, MLXEmbedding)
    assert isinstance(model.model.layers[0].self_attn.q_proj, MLXLinear)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, answer["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_greedy_equals_mlx_lm(folders, name, tmp_path):
    folder, answer = folders[name]
    exported = export_llm(
        load_causal_lm(folder), head=HeadConfig.minimal(), max_context_len=len(PROMPT) + STEPS
    )
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


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("model.norm.weight"), "missing tensors for LlamaForCausalLM: model.norm.weight"),
    (lambda t: t.update(spare=torch.zeros(1)), "unexpected tensors for LlamaForCausalLM: spare"),
    (lambda t: t.update({"lm_head.scales": torch.zeros(200, 3)}), "expected a multiple of the group size"),
])
def test_a_checkpoint_that_does_not_match_is_refused(folders, change, message, tmp_path):
    source = folders["llama"][0]
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ValueError, match=message):
        load_causal_lm(tmp_path)
