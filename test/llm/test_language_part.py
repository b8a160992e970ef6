"""Of a model for text and images, only the language model is loaded."""

import json

import pytest
import torch
import transformers as hf
from executorch_mlx.llm.export.survey import survey
from executorch_mlx.llm.export.weights import load_causal_lm
from safetensors.torch import load_file, save_file

TEXT = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=200, max_position_embeddings=128,
)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16, image_size=28, patch_size=14
)
PROMPT = torch.tensor([[5, 17, 100, 3, 77, 9]])


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = hf.Mistral3Config(
        text_config=TEXT | dict(model_type="mistral"), vision_config=VISION | dict(model_type="pixtral"), image_token_index=199
    )
    hf.Mistral3ForConditionalGeneration(config).save_pretrained(tmp_path)
    return tmp_path


def logits(model):
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


def test_logits_equal_those_of_the_whole_model(folder):
    model = load_causal_lm(folder)
    assert type(model) is hf.MistralForCausalLM
    assert logits(model).equal(logits(hf.Mistral3ForConditionalGeneration.from_pretrained(folder)))
    assert survey(folder).obstacle is None


def test_quantized_weights_are_dequantized(folder):
    tensors = load_file(folder / "model.safetensors")
    values = load_causal_lm(folder)
    for name, weight in list(tensors.items()):
        if "language_model" in name and name.endswith("_proj.weight"):
            scale = weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{name}_scale_inv": scale}
            own = values.get_parameter(name.removeprefix("language_model."))
            own.data = tensors[name].float() * scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="fp8", activation_scheme="static", weight_block_size=None)
    (folder / "config.json").write_text(json.dumps(config))
    assert logits(load_causal_lm(folder, dtype=torch.float32)).equal(logits(values))


def test_a_model_without_a_causal_language_model_is_refused(tmp_path):
    hf.Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got a model of kind qwen2_5_vl, expected one for which transformers has a causal"):
        load_causal_lm(tmp_path)
