"""Decoders over the caches of a program, in eager torch: the greedy tokens of `transformers`, in chunks and in rows.

`test_families.py` exports the families whose caches or attention differ. The mechanisms here are the same, so eager torch
is enough.
"""

import copy

import pytest
import torch
import transformers as hf
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.reference import Reference
from test_families import ALTERNATING, CHUNK, GPT, LATENT, PROMPT, ROUTED, greedy, random_model

STEPS = 64
FAMILIES = {
    "deepseek_v2, one query projection": (hf.DeepseekV2Config, hf.DeepseekV2ForCausalLM,
                                          LATENT | ROUTED | dict(q_lora_rank=None)),
    "longcat, two caches a layer": (hf.LongcatFlashConfig, hf.LongcatFlashForCausalLM,
                                    LATENT | dict(head_dim=8, num_layers=2, n_routed_experts=4, zero_expert_num=2,
                                                  moe_topk=2, expert_ffn_hidden_size=32, ffn_hidden_size=64)),
    "glm4_moe_lite": (hf.Glm4MoeLiteConfig, hf.Glm4MoeLiteForCausalLM, LATENT | ROUTED),
    "gemma3n": (hf.Gemma3nTextConfig, hf.Gemma3nForCausalLM,
                dict(head_dim=16, vocab_size_per_layer_input=256, hidden_size_per_layer_input=8, num_hidden_layers=4,
                     layer_types=ALTERNATING * 2, num_kv_shared_layers=2, sliding_window=12, laurel_rank=8,
                     altup_num_inputs=2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0])),
    "mpt": (hf.MptConfig, hf.MptForCausalLM, dict(d_model=48, n_heads=4, n_layers=2, max_seq_len=128)),
    "falcon": (hf.FalconConfig, hf.FalconForCausalLM, dict(multi_query=True)),
    "falcon, linear biases": (hf.FalconConfig, hf.FalconForCausalLM, dict(alibi=True, multi_query=False)),
    "gpt_bigcode": (hf.GPTBigCodeConfig, hf.GPTBigCodeForCausalLM, GPT),
    "codegen": (hf.CodeGenConfig, hf.CodeGenForCausalLM, GPT | dict(rotary_dim=8, n_ctx=128)),
    "gpt_neo": (hf.GPTNeoConfig, hf.GPTNeoForCausalLM,
                dict(num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4, window_size=12)),
}  # fmt: skip


def tokens_of(decoder, prompt):
    """The greedy tokens: the prompt in chunks in row 1, then steps of both rows, in which row 0 idles."""
    row, tokens, position = torch.tensor([1]), [], 0
    for chunk in prompt.split(decoder.chunk, 1):
        logits = decoder(chunk, torch.tensor([position]), row)
        position += chunk.shape[1]
    while len(tokens) < STEPS:
        tokens.append(int(logits[0, -1].argmax()))
        both = torch.tensor([[1, tokens[-1]]]), torch.tensor([3, position]), torch.tensor([0, 1])
        logits = decoder(*both, all_positions=True)
        position += 1
    return tokens


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers(name):
    model = random_model(*FAMILIES[name])
    expected = greedy(copy.deepcopy(model), PROMPT)[0].tolist()
    use_gathered_experts(model)
    reference = Reference.of(model, 24)
    decoder = CachedDecoder(model, rows=2, max_context_len=PROMPT.shape[1] + STEPS, chunk=CHUNK).eval()
    reference.check(decoder)
    assert len(set(expected)) > 5
    assert tokens_of(decoder, PROMPT) == expected
