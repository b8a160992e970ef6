"""Of a model for text and images, only the language model is loaded."""

import json
import re

import pytest
import torch
import transformers as hf
from executorch_mlx.custom_ops.packing import dequantize, quantize
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export.survey import survey
from executorch_mlx.llm.export.weights import load_causal_lm
from safetensors.torch import load_file, save_file
from test_quantized_folder import FORMATS, float8_by_tensor, gptq

TEXT = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=200,
    max_position_embeddings=128,
)
VISION = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=16,
    image_size=28,
    patch_size=14,
)
ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]), pad_token_id=0)
BLOCKS = dict(depth=1, hidden_size=32, num_heads=2, out_hidden_size=64)
TOKENS = dict(image_token_id=199, video_token_id=198, vision_start_token_id=197, vision_end_token_id=196)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
PROMPT = torch.tensor([[5, 17, 100, 3, 77, 9]])


CONFIGS = {
    "mistral3": lambda: hf.Mistral3Config(
        text_config=TEXT | dict(model_type="mistral"),
        vision_config=VISION | dict(model_type="pixtral"),
        image_token_index=199,
    ),
    # The names of its tensors differ: `model.text_model` in place of `model.language_model`.
    "smolvlm": lambda: hf.SmolVLMConfig(
        text_config=TEXT | dict(model_type="llama"), vision_config=VISION, image_token_id=199
    ),
    # Its outer config has no setting about tied weights.
    "voxtral": lambda: hf.VoxtralConfig(
        text_config=TEXT | dict(model_type="llama"), audio_token_id=199, audio_config=VISION | dict(num_mel_bins=16)
    ),
    # transformers has no causal language model of this kind, but one that computes the same for text.
    "qwen3_vl": lambda: hf.Qwen3VLConfig(text_config=TEXT | ROPE, vision_config=BLOCKS, **TOKENS),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(text_config=TEXT | ROPE, vision_config=BLOCKS, **TOKENS),
    "glm_ocr": lambda: hf.GlmOcrConfig(text_config=TEXT | ROPE, vision_config=BLOCKS, **TOKENS),
    "hunyuan_vl": lambda: hf.HunYuanVLConfig(text_config=TEXT | ROPE, vision_config=VISION, image_token_id=199),
    # transformers has no causal language model that computes the same: a part of the whole model is used.
    "paddleocr_vl": lambda: hf.PaddleOCRVLConfig(
        text_config=TEXT | ROPE,
        vision_config=VISION | dict(spatial_merge_size=2),
        image_token_id=199,
        vision_start_token_id=198,
        video_token_id=197,
    ),
    # The same, with states and an index that chooses pools of keys.
    "glm5_next": lambda: hf.Glm5NextConfig(
        text_config=TEXT
        | EXPERTS
        | dict(
            num_hidden_layers=2,
            layer_types=["linear_attention", "indexed_attention"],
            indexer_types=["full"] * 2,
            mlp_layer_types=["dense", "sparse"],
            num_key_value_heads=4,
            head_dim=0,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            v_head_dim=16,
            index_topk=8,
            index_kpool=4,
            index_head_dim=16,
            index_n_heads=2,
            linear_head_dim=16,
            linear_num_heads=4,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            pad_token_id=0,
        ),
        vision_config=BLOCKS | dict(projection_intermediate_size=32),
        image_token_id=199,
        video_token_id=198,
    ),
    # transformers converts the tensors only of the whole model.
    "minimax_m3_vl": lambda: hf.MiniMaxM3VLConfig(
        text_config=TEXT
        | EXPERTS
        | dict(
            num_hidden_layers=2,
            layer_types=["full_attention", "minimax_m3_sparse"],
            mlp_layer_types=["dense", "sparse"],
            dense_intermediate_size=96,
            shared_intermediate_size=32,
            rotary_dim=8,
            index_n_heads=2,
            index_head_dim=16,
            index_block_size=4,
        ),
        vision_config=VISION,
        projector_hidden_size=32,
        image_token_index=199,
        video_token_index=198,
    ),
    # transformers has a causal language model for its outer config.
    "qwen3_5": lambda: hf.Qwen3_5Config(
        text_config=TEXT | dict(layer_types=["full_attention"]),
        vision_config=dict(depth=1, hidden_size=32, num_heads=2),
        image_token_id=199,
        video_token_id=198,
        vision_start_token_id=197,
        vision_end_token_id=196,
    ),
    # For its outer config, transformers has a model for text and images in the place of a causal language model.
    "gemma4_unified": lambda: hf.Gemma4UnifiedConfig(
        text_config=TEXT | dict(layer_types=["full_attention"], global_head_dim=16, pad_token_id=0),
        vision_config=dict(mm_embed_dim=32, mm_posemb_size=16, patch_size=4),
        audio_config=None,
        image_token_id=199,
    ),
    # It has layers that attend to an image. The language model leaves them out.
    "mllama": lambda: hf.MllamaConfig(
        text_config=TEXT | dict(num_hidden_layers=3, cross_attention_layers=[1], pad_token_id=0),
        image_token_index=199,
        vision_config=VISION | dict(vision_output_dim=96, intermediate_layers_indices=[0], num_global_layers=1),
    ),
}


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path):
    write(CONFIGS[request.param](), tmp_path)
    return tmp_path


def write(config, folder):
    torch.manual_seed(0)
    whole_class(config)(config).save_pretrained(folder)


def whole_class(config):
    return hf.AutoModelForMultimodalLM._model_mapping[type(config)]


def logits(model):
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


def test_logits_equal_those_of_the_whole_model(folder):
    model, config = load_causal_lm(folder), hf.AutoConfig.from_pretrained(folder)
    assert isinstance(model, hf.PreTrainedModel) and not any("vis" in name for name, _ in model.named_modules())
    torch.testing.assert_close(logits(model), logits(whole_class(config).from_pretrained(folder)))
    assert survey(folder).obstacle is None


def test_chunks_over_caches_equal_the_whole_model(folder):
    model, whole = load_causal_lm(folder), whole_class(hf.AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    decoder = CachedDecoder(model, max_context_len=8).eval()
    with torch.no_grad():
        parts = [decoder(PROMPT[:, at : at + 3], torch.tensor([at]), all_positions=True) for at in (0, 3)]
    torch.testing.assert_close(torch.cat(parts, 1), logits(whole), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantize", [gptq, float8_by_tensor])
def test_weights_may_be_quantized(folder, quantize, request):
    if quantize is gptq and any(kind in request.node.name for kind in ("minimax_m3_vl", "glm5_next")):
        pytest.skip("transformers joins weights of these models, which is not supported beside packed weights")
    tensors = load_file(folder / "model.safetensors")
    floats, names = dict(tensors), [name for name in tensors if re.search(r"self_attn\.[qkvo](_b)?_proj\.weight", name)]
    for name in [name for name in names if "vis" not in name]:
        parts, floats[name] = quantize(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{leaf}": part.contiguous() for leaf, part in parts.items()}
    assert len(tensors) > len(floats)
    save_file(floats, folder / "model.safetensors", {"format": "pt"})
    expected = logits(load_causal_lm(folder))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = FORMATS[quantize][0]
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(load_causal_lm(folder)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_output_projection_of_its_own_is_not_tied(is_packed, tmp_path):
    """By default, the outer config of these models says that the output projection is tied."""
    write(CONFIGS["mistral3"](), tmp_path)
    assert hf.AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
    expected = load_causal_lm(tmp_path)
    expected.lm_head.weight = torch.nn.Parameter(torch.randn_like(expected.lm_head.weight))
    tensors = {f"language_model.{name}": tensor for name, tensor in expected.state_dict().items()}
    if is_packed:
        name = "language_model.model.embed_tokens"
        packed = quantize(tensors[f"{name}.weight"], 8, 32)
        tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in zip(("weight", "scales", "biases"), packed)}
        expected.model.embed_tokens.weight.data = dequantize(*packed, 32, 8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    torch.testing.assert_close(logits(load_causal_lm(tmp_path)), logits(expected))


def test_experts_of_a_language_model(tmp_path):
    write(hf.Qwen3VLMoeConfig(text_config=TEXT | ROPE | EXPERTS, vision_config=BLOCKS, **TOKENS), tmp_path)
    expected = hf.Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_causal_lm(tmp_path)), logits(expected))


def test_a_causal_language_model_that_has_parts_for_images(tmp_path):
    """Its own tensors have the names of a whole model."""
    config = hf.FuyuConfig(text_config=TEXT | dict(model_type="persimmon"), patch_size=4)
    write(config, tmp_path)
    expected = hf.FuyuForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_causal_lm(tmp_path)), logits(expected))


def test_names_that_transformers_changes_in_the_whole_model(tmp_path):
    """In the files, the layers of the language model are `layers`, and those for images are `blocks`."""
    config = hf.Cosmos3OmniConfig(
        text_config=TEXT | ROPE, vision_config=BLOCKS | dict(deepstack_visual_indexes=[0]), **TOKENS
    )
    write(config, tmp_path)
    assert any(name.startswith("layers.") for name in load_file(tmp_path / "model.safetensors"))
    expected = whole_class(config).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_causal_lm(tmp_path)), logits(expected))


def test_the_part_of_a_speaking_model_that_writes(tmp_path):
    audio = dict(d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, output_dim=64)
    config = hf.Qwen2_5OmniThinkerConfig(text_config=TEXT | ROPE, vision_config=BLOCKS, audio_config=audio)
    thinker = whole_class(config)(config).eval()
    thinker.save_pretrained(tmp_path)
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {"talker.weight": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    hf.Qwen2_5OmniConfig(thinker_config=config.to_dict()).save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_causal_lm(tmp_path)), logits(thinker))
    assert survey(tmp_path).obstacle is None


def test_older_names_of_tensors(tmp_path):
    """The hub has checkpoints of Qwen2-VL and Qwen2.5-VL with these names."""
    write(CONFIGS["qwen2_5_vl"](), tmp_path)
    expected = logits(load_causal_lm(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {
        re.sub(r"^model\.(visual|language_model)\.", lambda m: {"visual": "visual."}.get(m[1], "model."), name): tensor
        for name, tensor in tensors.items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(load_causal_lm(tmp_path)), expected)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.text_model."])
def test_a_folder_of_a_language_model_with_the_names_of_a_whole_model(prefix, tmp_path):
    """Tools that leave the other media out of a checkpoint often keep the names of the tensors."""
    write_language_model(prefix, tmp_path)
    expected = logits(load_causal_lm(tmp_path / "expected"))
    torch.testing.assert_close(logits(load_causal_lm(tmp_path)), expected)


def test_an_error_about_missing_tensors_names_those_of_the_files(tmp_path):
    write_language_model("unknown.model.", tmp_path)
    with pytest.raises(ValueError, match="missing tensors for Llama.*; the files have others: unknown.model"):
        load_causal_lm(tmp_path)


def write_language_model(prefix, folder):
    """Write a Llama to the folder, with `prefix` in place of `model.`, and to its subfolder `expected`."""
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)).save_pretrained(folder / "expected")
    hf.LlamaConfig(**TEXT).save_pretrained(folder)
    tensors = load_file(folder / "expected" / "model.safetensors")
    tensors = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "config, got",
    [
        (hf.CLIPConfig, "a model of kind clip"),
        # transformers has a causal language model of this kind: the decoder without the encoder.
        (hf.BartConfig, "an encoder with a decoder of kind bart"),
    ],
)
def test_a_model_without_a_causal_language_model_is_refused(config, got, tmp_path):
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"got {got}, expected one for which transformers has a causal"):
        load_causal_lm(tmp_path)
    assert got in survey(tmp_path).obstacle


def test_a_model_that_writes_blocks_of_text_by_diffusion_is_refused(tmp_path):
    """Its decoder reads the results of its encoder."""
    text = TEXT | EXPERTS | dict(layer_types=["full_attention"], global_head_dim=16, top_k_experts=2, pad_token_id=0)
    vision = VISION | dict(num_key_value_heads=2, global_head_dim=16)
    config = hf.DiffusionGemmaConfig(text_config=text, vision_config=vision)
    write(config, tmp_path)
    with pytest.raises(ValueError, match="DiffusionGemmaForBlockDiffusion cannot run over the tokens of a text alone"):
        export_llm(tmp_path)
