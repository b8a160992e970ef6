"""Checkpoints with MXFP4 experts, such as gpt-oss, are loaded without dequantizing the experts."""

import json

import pytest
import torch
from executorch_mlx import LLM
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.packed import MLXExperts
from executorch_mlx.llm.export.weights import load_causal_lm
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

STEPS = 64
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a weight [E, K, N]. Returns the blocks [E, N, K / 32, 16], the scales [E, N, K / 32] and the dequantized
    weight [E, K, N]."""
    groups = weight.mT.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9).log2().floor() - 2  # the largest element is 6
    scaled = groups / torch.exp2(exponents)
    index = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    values = E2M1[index] * scaled.sign() * torch.exp2(exponents)
    codes = (index + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks, (exponents.squeeze(-1) + 127).to(torch.uint8), values.flatten(-2).mT.contiguous()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with MXFP4 experts, and the model with their values in floats."""
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=200,
        max_position_embeddings=256,
        sliding_window=16,
        initializer_range=0.2,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = GptOssForCausalLM(config).eval()
    for parameter in model.parameters():  # also biases and sinks
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("mxfp4")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, values = pack(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = values
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, model


def test_packer_agrees_with_transformers(checkpoint):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, model = checkpoint
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    values = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32)
    assert values.equal(model.get_parameter(name))


def test_experts_keep_their_bytes(checkpoint):
    folder, _ = checkpoint
    loaded, tensors = load_causal_lm(folder), load_file(folder / "model.safetensors")
    for layer in range(2):
        experts = loaded.model.layers[layer].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            packed = getattr(experts, name)
            assert isinstance(packed, MLXExperts) and packed.mode == "mxfp4"
            stored = f"model.layers.{layer}.mlp.experts.{name}"
            assert packed.words.view(torch.uint8).flatten().equal(tensors[f"{stored}_blocks"].flatten())
            assert packed.scales.equal(tensors[f"{stored}_scales"])


def test_logits_of_mlx_lm_s_layout_equal_transformers(checkpoint, tmp_path):
    """mlx-lm splits the gate and up projections, whose rows alternate in gpt-oss."""
    folder, model = checkpoint
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n]:
        path, _, leaf = name.rpartition(".")
        weight, _, kind = leaf.replace("proj_", "proj.").partition(".")
        tensor = tensors.pop(name)
        if kind == "blocks":
            kind, tensor = "weight", tensor.flatten(-2).view(torch.uint32)
        if weight == "down_proj":
            tensors[f"{path}.down_proj.{kind}"] = tensor
        else:
            tensors |= {
                f"{path}.{part}_proj.{kind}": tensor[:, i::2].contiguous() for i, part in enumerate(("gate", "up"))
            }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "mlx"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    prompt = torch.arange(3, 40)[None]
    loaded = use_gathered_experts(load_causal_lm(tmp_path, dtype=torch.float32))
    with torch.no_grad():
        expected, got = (m(prompt).logits for m in (model, loaded))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_tokens_equal_transformers(checkpoint, tmp_path):
    folder, model = checkpoint
    prompt = torch.randint(1, 200, (1, 40), generator=torch.Generator().manual_seed(2))
    exported = export_llm(folder, chunk=16)
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    expected = model.generate(prompt, max_new_tokens=STEPS, do_sample=False)[0, 40:].tolist()
    answer = LLM.load(tmp_path / "model.pte").generate(prompt[0].tolist(), max_new_tokens=STEPS, ignore_eos=True)
    assert answer.result().tokens == expected


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("down_proj_blocks", lambda x: x[:, :-1], "got blocks torch.uint8"),
        ("down_proj_scales", lambda x: x.int(), "scales torch.int32"),
        ("down_proj_scales", None, "missing tensors"),
    ],
)
def test_damaged_tensors_are_refused(checkpoint, tmp_path, name, change, message):
    folder, _ = checkpoint
    tensors, path = load_file(folder / "model.safetensors"), f"model.layers.0.mlp.experts.{name}"
    tensor = tensors.pop(path)
    if change:
        tensors[path] = change(tensor).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        load_causal_lm(tmp_path)
