"""Speech models with random weights that export in seconds, and the tokenizer of the demo model."""

from pathlib import Path

import torch

DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
VOCABULARY = 1536
EOS, START = 1, 3
LANGUAGES = {"<|en|>": 1470, "<|de|>": 1471, "<|fr|>": 1472}
TASKS = {"transcribe": 1473, "translate": 1474}
NO_TIMESTAMPS = 1484  # the next 51 tokens are the timestamps of a window of one second, 0.02 s apart
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": EOS, "decoder_start_token_id": START}


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


def whisper(multilingual: bool = True, **changes):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(3)
    options = {
        "vocab_size": VOCABULARY,
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "d_model": 32,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 50,
        "max_target_positions": 40,
        "init_std": 0.4,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    model = WhisperForConditionalGeneration(WhisperConfig(**options | IDS | changes)).eval()
    model.model.decoder.embed_positions.weight.data.normal_(0, 1.0)  # so that the tokens vary
    generation = {
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "is_multilingual": multilingual,
        "suppress_tokens": [7, 8, 9],
        "begin_suppress_tokens": [11, 1_000_000],
        "max_initial_timestamp_index": 20,
        "max_length": None,
    }
    if multilingual:
        generation |= {"lang_to_id": LANGUAGES, "task_to_id": TASKS}
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    return model


def moonshine(**changes):
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    torch.manual_seed(5)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "encoder_num_hidden_layers": 1,
        "decoder_num_hidden_layers": 1,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
        "pad_head_dim_to_multiple_of": 8,
    }
    return MoonshineForConditionalGeneration(MoonshineConfig(**options | IDS | changes)).eval()


def moonshine_streaming(**changes):
    from transformers import MoonshineStreamingConfig, MoonshineStreamingForConditionalGeneration

    torch.manual_seed(7)
    encoder = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_windows": [[5, 3], [4, 0]],
    }
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "encoder_config": encoder,
        "initializer_range": 0.5,
    }
    return MoonshineStreamingForConditionalGeneration(MoonshineStreamingConfig(**options | IDS | changes)).eval()


def noise(count: int, seed: int = 0):
    """Sample of noise in bursts, float32 `[count]`."""
    import numpy

    random = numpy.random.default_rng(seed)
    loudness = numpy.repeat(random.uniform(0.01, 0.3, -(-count // 800)), 800)[:count]
    return (random.standard_normal(count) * loudness).astype("float32")
