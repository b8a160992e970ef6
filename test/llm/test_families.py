"""Each supported model family: exports, runs and gives the greedy tokens of transformers."""

import copy

import pytest
import torch
import transformers as hf
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm

SMALL = dict(
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=0,
)
ALTERNATING = ["sliding_attention", "full_attention"]
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=200,
    short_factor=[1.0] * 6, long_factor=[2.0] * 6,
)
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)

LATENT = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10
)
ROUTED = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=2, topk_group=1, first_k_dense_replace=1
)
GPT = dict(n_embd=48, n_head=4, n_layer=2, n_positions=128)

# Name → config class, model class, changes of SMALL. Prompts have 30 tokens, in chunks of 16.
FAMILIES = {
    "llama2": (hf.LlamaConfig, hf.LlamaForCausalLM, dict(num_key_value_heads=4)),
    "llama3": (hf.LlamaConfig, hf.LlamaForCausalLM,
               dict(rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=16)),
    "llama, dynamic rope": (hf.LlamaConfig, hf.LlamaForCausalLM,
                            dict(rope_parameters=DYNAMIC, max_position_embeddings=64)),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, dict(sliding_window=10)),
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM,
              dict(use_sliding_window=True, sliding_window=20, max_window_layers=1, layer_types=ALTERNATING)),
    "qwen2, yarn": (hf.Qwen2Config, hf.Qwen2ForCausalLM, dict(rope_parameters=YARN)),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, dict(head_dim=16, tie_word_embeddings=True)),
    "gemma2": (hf.Gemma2Config, hf.Gemma2ForCausalLM, dict(head_dim=16, sliding_window=12, tie_word_embeddings=False)),
    "gemma3": (hf.Gemma3TextConfig, hf.Gemma3ForCausalLM,
               dict(head_dim=16, sliding_window=12, layer_types=ALTERNATING, tie_word_embeddings=False)),
    "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM, dict(sliding_window=None)),
    "phi3, longrope": (hf.Phi3Config, hf.Phi3ForCausalLM,
                       dict(sliding_window=40, rope_parameters=LONGROPE, max_position_embeddings=400)),
    "smollm3": (hf.SmolLM3Config, hf.SmolLM3ForCausalLM, dict(no_rope_layers=[1, 0])),
    "olmo2": (hf.Olmo2Config, hf.Olmo2ForCausalLM, dict()),
    "mixtral": (hf.MixtralConfig, hf.MixtralForCausalLM,
                dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM,
                  dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "latent attention": (hf.DeepseekV3Config, hf.DeepseekV3ForCausalLM, LATENT | ROUTED),
    "sinks": (hf.GptOssConfig, hf.GptOssForCausalLM,
              dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=12, layer_types=ALTERNATING)),
    "chunked attention": (hf.Llama4TextConfig, hf.Llama4ForCausalLM,
                          dict(head_dim=16, attention_chunk_size=12, no_rope_layers=[1, 0], num_local_experts=4,
                               intermediate_size_mlp=64, interleave_moe_layer_step=2, floor_scale=8)),
    "shared caches": (hf.Gemma4TextConfig, hf.Gemma4ForCausalLM,
                      dict(head_dim=16, global_head_dim=24, num_hidden_layers=4, layer_types=ALTERNATING * 2,
                           num_kv_shared_layers=2, sliding_window=12, vocab_size_per_layer_input=256,
                           hidden_size_per_layer_input=8)),
    "linear biases": (hf.BloomConfig, hf.BloomForCausalLM, dict(n_layer=2, n_head=4, tie_word_embeddings=False)),
    "own attention": (hf.GPTJConfig, hf.GPTJForCausalLM, GPT | dict(rotary_dim=8)),
}
# These are exported with two rows, which also changes the methods: `prefill` and `decode`.
TWO_ROWS = {"latent attention", "sinks", "chunked attention", "linear biases"}
PROMPT_LENGTH, CHUNK, STEPS = 30, 16, 64


def random_model(config_class, model_class, changes):
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL | changes)).eval()
    for parameter in model.parameters():  # large weights, so that different models give different answers
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def greedy(model, prompt):
    model.generation_config.eos_token_id = None
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=STEPS, pad_token_id=0)
    return tokens[:, prompt.shape[1] :]


PROMPT = torch.randint(1, 256, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers(name, tmp_path):
    model = random_model(*FAMILIES[name])
    expected = greedy(copy.deepcopy(model), PROMPT)[0].tolist()
    exported = export_llm(
        model, chunk=CHUNK, head=HeadConfig.minimal(), max_context_len=PROMPT_LENGTH + STEPS,
        batch=2 if name in TWO_ROWS else 1,
    )  # fmt: skip
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    llm = LLM.load(tmp_path / "model.pte")
    assert len(set(expected)) > 5
    assert llm.generate(PROMPT[0].tolist(), max_new_tokens=STEPS).result().tokens == expected
    if name in TWO_ROWS:  # again, from the cached prompt, in two rows at once
        answers = llm.generate_batch([PROMPT[0].tolist()] * 2, max_new_tokens=STEPS)
        assert [answer.tokens for answer in answers] == [expected] * 2
        assert max(answer.metrics.cached_tokens for answer in answers) > 0
