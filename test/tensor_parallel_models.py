"""Small random models of several families, for the tests of tensor parallelism."""

import torch

VOCABULARY = 131  # a prime number: the parts of the vocabulary are padded


def model(family: str, heads: int = 4, key_heads: int = 2):
    import transformers as hf

    common = {
        "vocab_size": VOCABULARY, "hidden_size": 32 * heads, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": heads, "max_position_embeddings": 128, "initializer_range": 0.3,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    grouped = common | {"num_key_value_heads": key_heads}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
    makers = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
        # norms of queries and keys, tied embeddings
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped, head_dim=32, tie_word_embeddings=True)),
        # one product for queries, keys and values, and one for gate and up
        "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**grouped)),
        # a norm over all queries, biases
        "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**grouped)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped)),
        # transposed weights, learned positions
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32 * heads, n_head=heads, n_layer=1, n_positions=128)
        ),
        # the queries, keys and values of a head lie together; a bias for each head
        "bloom": lambda: hf.BloomForCausalLM(
            hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32 * heads, n_head=heads, n_layer=1)
        ),
        # experts; the outputs of gate and up alternate, and so do rotated pairs; attention sinks
        "gpt_oss": lambda: hf.GptOssForCausalLM(
            hf.GptOssConfig(**grouped, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
        ),
        "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**grouped, head_dim=32, num_experts=4, **experts)
        ),
        "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**grouped)),
        # latent attention
        "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
            hf.DeepseekV3Config(
                **common | {"num_key_value_heads": heads}, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16,
                v_head_dim=32, qk_nope_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1,
                first_k_dense_replace=0, **experts,
            )
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    made = makers[family]().eval().requires_grad_(False)
    for parameter in made.parameters():  # biases and norms that are not trivial
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return made


FAMILIES = ("qwen3", "phi3", "olmo2", "gpt_oss", "deepseek_v3")  # together they need all rules for splits
MORE_FAMILIES = ("llama", "qwen2", "gpt2", "bloom", "qwen3_moe", "cohere")
