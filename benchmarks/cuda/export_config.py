"""The model that all sides of the benchmark run: the configuration of Qwen3-0.6B."""

CONFIG = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}  # fmt: skip
