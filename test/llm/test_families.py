"""Each supported model family is exported and run. Its greedy tokens equal those of transformers."""

import fcntl
import hashlib

import pytest
import torch
import transformers as hf
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import export_llm

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
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    original_max_position_embeddings=200,
    short_factor=[1.0] * 6,
    long_factor=[2.0] * 6,
)
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)

# Name → config class, model class, changes of SMALL. Prompts have 30 tokens, in chunks of 16.
FAMILIES = {
    "llama2": (hf.LlamaConfig, hf.LlamaForCausalLM, dict(num_key_value_heads=4)),
    "llama3": (
        hf.LlamaConfig,
        hf.LlamaForCausalLM,
        dict(rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=16),
    ),
    "llama, dynamic rope": (
        hf.LlamaConfig,
        hf.LlamaForCausalLM,
        dict(rope_parameters=DYNAMIC, max_position_embeddings=64),
    ),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, dict(sliding_window=10)),
    "qwen2": (
        hf.Qwen2Config,
        hf.Qwen2ForCausalLM,
        dict(use_sliding_window=True, sliding_window=20, max_window_layers=1, layer_types=ALTERNATING),
    ),
    "qwen2, yarn": (hf.Qwen2Config, hf.Qwen2ForCausalLM, dict(rope_parameters=YARN)),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, dict(head_dim=16, tie_word_embeddings=True)),
    "gemma2": (hf.Gemma2Config, hf.Gemma2ForCausalLM, dict(head_dim=16, sliding_window=12, tie_word_embeddings=False)),
    "gemma3": (
        hf.Gemma3TextConfig,
        hf.Gemma3ForCausalLM,
        dict(head_dim=16, sliding_window=12, layer_types=ALTERNATING, tie_word_embeddings=False),
    ),
    "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM, dict(sliding_window=None)),
    "phi3, longrope": (
        hf.Phi3Config,
        hf.Phi3ForCausalLM,
        dict(sliding_window=40, rope_parameters=LONGROPE, max_position_embeddings=400),
    ),
    "smollm3": (hf.SmolLM3Config, hf.SmolLM3ForCausalLM, dict(no_rope_layers=[1, 0])),
    "olmo2": (hf.Olmo2Config, hf.Olmo2ForCausalLM, dict()),
    "mixtral": (hf.MixtralConfig, hf.MixtralForCausalLM, dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        hf.Qwen3MoeForCausalLM,
        dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
}
PROMPT_LENGTH, STEPS = 30, 64
# Changes of SMALL. A model of these sizes uses every matrix-product kernel. The sizes are not multiples of 16.
WIDE = dict(hidden_size=328, intermediate_size=424)
CHUNK, CONTEXT = 64, 128


def random_model(config_class, model_class, changes):
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL | changes)).eval()
    for parameter in model.parameters():  # large weights, so that different models give different answers
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def wide_model(name, **changes):
    config, model, family_changes = FAMILIES[name]
    changes = WIDE | changes
    if "longrope" in name:
        del changes["hidden_size"]  # the factors of the family are for a small head
    return random_model(config, model, family_changes | changes)


def family_program(name, tmp_path_factory):
    """The path of a program that returns the logits of `wide_model(name)`. All test processes share the file."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if base.name.startswith("popen-") else base  # popen-N is the folder of a pytest-xdist process
    path = folder / f"family_{hashlib.md5(name.encode()).hexdigest()}.pte"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            exported = export_llm(wide_model(name), chunk=CHUNK, max_context_len=CONTEXT, outputs="logits")
            assert exported.report.refused == ()
            exported.save(path)
    return path


def greedy(model, prompt):
    model.generation_config.eos_token_id = None
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=STEPS, pad_token_id=0)
    return tokens[:, prompt.shape[1] :]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers(name, tmp_path_factory):
    prompt = torch.randint(1, 256, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))
    expected = greedy(wide_model(name), prompt)[0].tolist()
    llm = LLM.load(family_program(name, tmp_path_factory), chunk=16)
    assert len(set(expected)) > 5
    assert llm.generate(prompt[0].tolist(), max_new_tokens=STEPS).result().tokens == expected
