"""Adapters of peft and mlx-lm are merged into the weights, or refused."""

import json
import subprocess
import sys

import pytest
import torch
import transformers as hf
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.checkpoints.adapter import merge_adapter
from executorch_mlx.llm.export.weights import load_causal_lm
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    rope_theta=10000.0,
)
PROMPT = torch.arange(1, 13)[None]


def logits(model):
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write_adapter(folder, prefix):
    """Write an adapter whose names begin with `prefix`, and return the logits of the adapted model."""
    adapted = get_peft_model(
        load_causal_lm(folder.parent / "model"), LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    path = folder / "adapter_model.safetensors"
    tensors = {name.replace("model.layers.", f"{prefix}layers."): tensor for name, tensor in load_file(path).items()}
    if "language_model" in prefix:
        tensors["base_model.model.model.vision_tower.layers.0.q_proj.lora_A.weight"] = torch.ones(2, 2)
    save_file(tensors, path, {"format": "pt"})
    return logits(adapted)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_an_adapter_may_be_for_the_whole_model(folder, prefix, tmp_path):
    expected = write_adapter(tmp_path / "adapter", prefix)
    assert not logits(load_causal_lm(folder)).allclose(expected)
    merged = merge_adapter(load_causal_lm(folder), tmp_path / "adapter", torch.float32)
    torch.testing.assert_close(logits(merged), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    ],
    ids=str,
)
def test_a_layer_that_shares_its_weight(settings, tmp_path):
    """The adapter of a layer changes no other layer: neither the one that it is tied to, nor one that repeats it."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, tie_word_embeddings=True, initializer_range=0.2)).eval()
    model.save_pretrained(tmp_path / "model")
    adapted = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **settings)).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(load_causal_lm(tmp_path / "model"), tmp_path / "adapter", torch.float32)
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    is_tied = merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    assert is_tied == (settings["target_modules"] == ["q_proj"])


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    "settings", [{"modules_to_save": ["embed_tokens", "lm_head"]}, {}, {"trainable_token_indices": [64, 66]}], ids=str
)
def test_training_may_add_tokens(settings, is_tied, folder, tmp_path):
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SMALL, tie_word_embeddings=is_tied, initializer_range=0.2)
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    model = hf.LlamaForCausalLM.from_pretrained(folder).eval()  # whose config has the path of the model without tokens
    model.resize_token_embeddings(67)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings))
    for parameter in adapted.eval().parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(load_causal_lm(folder), tmp_path / "adapter", torch.float32)
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    assert merged.config.vocab_size == 67


def test_new_tokens_without_rows_of_the_output_projection_are_refused(folder, tmp_path):
    model = hf.LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(67)
    get_peft_model(model, LoraConfig(r=2, target_modules=["embed_tokens"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="got 67 tokens in the embedding, but no output projection, which has 64"):
        merge_adapter(load_causal_lm(folder), tmp_path / "adapter", torch.float32)


def test_the_tokenizer_of_an_adapter(folder, tmp_path):
    """It may have more tokens, or a chat template."""
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    tokenizer.save_pretrained(folder)
    write_adapter(tmp_path / "adapter", "model.")
    tokenizer.chat_template = "of the adapter"
    tokenizer.save_pretrained(tmp_path / "adapter")
    exported = export_llm(folder, adapter=tmp_path / "adapter", verify=False, speculation=False)
    exported.save(tmp_path / "model.pte")
    assert b"of the adapter" in (tmp_path / "model.pte").read_bytes()


def test_an_adapter_with_other_names_is_refused(folder, tmp_path):
    write_adapter(tmp_path / "adapter", "model.decoder.")
    message = "adapter does not fit LlamaForCausalLM: missing tensors: base_model.model.model.layers"
    with pytest.raises(ValueError, match=message):
        merge_adapter(load_causal_lm(folder), tmp_path / "adapter", torch.float32)


# Trains nothing, but writes an adapter with arbitrary weights as mlx-lm does, and the logits of the adapted model.
MLX_LM = """
import sys, json, mlx.core as mx
from pathlib import Path
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.tuner.utils import linear_to_lora_layers
for kind in ("lora", "dora"):
    model, _ = utils.load_model(Path(sys.argv[1]))
    model.freeze()
    keys = ["self_attn.q_proj", "mlp.down_proj"] + ["model.embed_tokens"] * (kind == "lora")
    settings = {"rank": 2, "scale": 3.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, 1, settings, use_dora=kind == "dora")
    mx.random.seed(0)
    parameters = tree_flatten(model.trainable_parameters())
    tensors = {n: mx.random.normal(t.shape) * 0.3 + (n[-2:] == ".m") for n, t in parameters}
    model.load_weights(list(tensors.items()), strict=False)
    folder = Path(sys.argv[2]) / kind
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    settings = {"fine_tune_type": kind, "num_layers": 1, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    mx.save_safetensors(str(folder / "logits.safetensors"), {"logits": model.eval()(mx.arange(1, 13)[None])})
"""


def test_an_adapter_of_mlx_lm(folder, tmp_path):
    done = subprocess.run([sys.executable, "-c", MLX_LM, folder, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for kind in ("lora", "dora"):
        merged = merge_adapter(load_causal_lm(folder), tmp_path / kind, torch.float32)
        expected = load_file(tmp_path / kind / "logits.safetensors")["logits"]
        torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
        assert not logits(load_causal_lm(folder)).allclose(expected, atol=1e-2)
        # Early versions scale by scale * alpha / rank. Here this is 3 as well.
        older = {"rank": 2, "alpha": 4.0, "scale": 1.5, "dropout": 0.0}
        settings = {"lora_layers": 1, "lora_parameters": older, "use_dora": kind == "dora"}
        (tmp_path / kind / "adapter_config.json").write_text(json.dumps(settings))
        merged = merge_adapter(load_causal_lm(folder), tmp_path / kind, torch.float32)
        torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
