"""Small, randomly initialized Hugging Face models with two layers and a hidden size of 32."""

from __future__ import annotations

import torch
import transformers as hf

VOCABULARY = 96
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# A sliding-window layer, with a window shorter than the sequence, and a full-attention layer.
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

# Name → (configuration class, changes to DECODER).
DECODERS = {
    "llama": (hf.LlamaConfig, {}),
    "mistral": (hf.MistralConfig, {"sliding_window": 4}),
    "qwen2": (hf.Qwen2Config, {}),
    "qwen3": (hf.Qwen3Config, {"head_dim": 16}),
    "gemma2": (hf.Gemma2Config, {"head_dim": 16, **WINDOWED}),
    "gemma3": (hf.Gemma3TextConfig, {"head_dim": 16, **WINDOWED}),
    "phi3": (hf.Phi3Config, {"partial_rotary_factor": 0.5, **SPECIAL}),
    "smollm3": (hf.SmolLM3Config, {"no_rope_layers": [1, 0], **SPECIAL}),
    "olmo2": (hf.Olmo2Config, SPECIAL),
}


class OneResult(torch.nn.Module):
    """Calls a model with positional inputs, which become the arguments `names`, and returns the attribute `result`."""

    def __init__(self, model: torch.nn.Module, result: str, *names: str, **fixed):
        super().__init__()
        self.model, self.result, self.names, self.fixed = model, result, names, fixed

    def forward(self, *inputs):
        return getattr(self.model(**dict(zip(self.names, inputs)), **self.fixed), self.result)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape)


def decoder(name: str, batch: int = 1, length: int = 8):
    config, differences = DECODERS[name]
    model = hf.AutoModelForCausalLM.from_config(config(**DECODER | differences))
    return OneResult(model, "logits", "input_ids", use_cache=False), (tokens(batch, length),)


def gpt2():
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, **SPECIAL)
    model = hf.GPT2LMHeadModel(config)
    return OneResult(model, "logits", "input_ids", use_cache=False), (tokens(2, 8),)


ENCODER_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ENCODER = {key: DECODER[key] for key in ENCODER_KEYS}


def bert():
    """The second sequence has padding."""
    model = hf.BertModel(hf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **ENCODER))
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    return OneResult(model, "last_hidden_state", "input_ids", "attention_mask"), (tokens(2, 8), mask)


def t5_encoder():
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        **SPECIAL,
    )
    return OneResult(hf.T5EncoderModel(config), "last_hidden_state", "input_ids"), (tokens(2, 8),)


def vit():
    config = hf.ViTConfig(image_size=32, patch_size=8, num_labels=10, **ENCODER)
    return OneResult(hf.ViTForImageClassification(config), "logits", "pixel_values"), (torch.randn(2, 3, 32, 32),)


class Similarity(torch.nn.Module):
    """The similarity of each image to each text, and the text embeddings."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids, pixel_values):
        output = self.model(input_ids=input_ids, pixel_values=pixel_values)
        return output.logits_per_image, output.text_embeds


def clip():
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **ENCODER, **SPECIAL}
    vision = {"image_size": 32, "patch_size": 8, **ENCODER}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return Similarity(hf.CLIPModel(config)), (tokens(2, 8), torch.randn(2, 3, 32, 32))


def whisper_config():
    return hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        decoder_start_token_id=1,
        **SPECIAL,
    )


def whisper_encoder():
    model = hf.WhisperModel(whisper_config()).encoder
    return OneResult(model, "last_hidden_state", "input_features"), (torch.randn(1, 8, 32),)


def whisper_decoder():
    model = hf.WhisperModel(whisper_config()).decoder
    encoder_states = torch.randn(1, 16, 32)
    wrapped = OneResult(model, "last_hidden_state", "input_ids", "encoder_hidden_states", use_cache=False)
    return wrapped, (tokens(1, 8), encoder_states)
