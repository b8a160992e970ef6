"""The Hugging Face configurations of the models that all sides run. A program is named after its shape.

With the suffix -int4 or -int8, the weights have 4 or 8 bits, in groups of 32. The embedding and the output projection
always have 8 bits then.
"""

SHAPES = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    },
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    # to try the scripts
    "tiny": {
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}
SHAPES["llama-8-layers"] = SHAPES["llama-8b"] | {"num_hidden_layers": 8}  # for several requests at once
SHAPES |= {f"{shape}-int{bits}": config for shape, config in SHAPES.items() for bits in (4, 8)}
GROUP_SIZE = 32


def bits_of(shape: str) -> int:
    """Return the number of bits of a weight."""
    return {"int4": 4, "int8": 8}.get(shape.rpartition("-")[2], 16)
