"""Model families whose layers keep a state: greedy tokens equal those of transformers.

All families run in eager torch, in the module that an export lowers. Two families are exported and run in the engine:
together, they use most of the code for states. `state_programs.py` exports all families.
"""

import copy

import pytest
import torch
import transformers as hf
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.packed import MLXLinear
from executorch_mlx.llm.export.quantize import quantize_model
from executorch_mlx.llm.export.reference import Reference

SMALL = dict(
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=False,
)
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
CONVOLUTIONS = ["conv", "full_attention", "conv"]
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
DELTA = dict(
    layer_types=LAYERS,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    head_dim=16,
)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=12, mamba_d_state=16, mamba_n_groups=2, mamba_d_ssm=96, mamba_expand=2)

# Name → config class, model class, changes of SMALL.
FAMILIES = {
    "qwen3_next": (
        hf.Qwen3NextConfig,
        hf.Qwen3NextForCausalLM,
        DELTA | EXPERTS | dict(shared_expert_intermediate_size=32),
    ),
    "qwen3_5": (hf.Qwen3_5TextConfig, hf.Qwen3_5ForCausalLM, DELTA),
    "qwen3_5_moe": (
        hf.Qwen3_5MoeTextConfig,
        hf.Qwen3_5MoeForCausalLM,
        DELTA | EXPERTS | dict(shared_expert_intermediate_size=32),
    ),
    # Its third layer reads n-grams of tokens, and its second one has an index that chooses pools of keys.
    "qwen4_exp": (
        hf.Qwen4ExpTextConfig,
        hf.Qwen4ExpForCausalLM,
        DELTA
        | EXPERTS
        | dict(
            shared_expert_intermediate_size=32,
            hc_count=2,
            hc_lowrank=16,
            ple_layer_ids=[3],
            ple_embed_dim=32,
            ngram_vocab_size_base=101,
            make_ngram_vocab_size_divisible_by=4,
            split_ngram_parts=2,
            heads_per_ngram=2,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=128,
            indexer_compress_ratio=4,
            eos_token_id=5,
        ),
    ),
    "olmo_hybrid": (
        hf.OlmoHybridConfig,
        hf.OlmoHybridForCausalLM,
        dict(
            layer_types=LAYERS,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=12,
        ),
    ),
    "lfm2": (hf.Lfm2Config, hf.Lfm2ForCausalLM, dict(layer_types=CONVOLUTIONS, block_multiple_of=16)),
    "lfm2_moe": (hf.Lfm2MoeConfig, hf.Lfm2MoeForCausalLM, EXPERTS | dict(layer_types=CONVOLUTIONS, num_dense_layers=1)),
    "granitemoehybrid": (
        hf.GraniteMoeHybridConfig,
        hf.GraniteMoeHybridForCausalLM,
        MAMBA2
        | dict(
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
        ),
    ),
    "falcon_h1": (hf.FalconH1Config, hf.FalconH1ForCausalLM, MAMBA2 | dict(head_dim=16)),
    "bamba": (hf.BambaConfig, hf.BambaForCausalLM, MAMBA2 | dict(attn_layer_indices=[1])),
    "mamba2": (
        hf.Mamba2Config,
        hf.Mamba2ForCausalLM,
        dict(num_heads=8, head_dim=12, state_size=16, n_groups=2, expand=2, chunk_size=16),
    ),
    "nemotron_h": (
        hf.NemotronHConfig,
        hf.NemotronHForCausalLM,
        dict(
            layers_block_type=["mamba", "attention", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=12,
            ssm_state_size=16,
            n_groups=2,
            head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
            n_group=1,
            topk_group=1,
        ),
    ),
    "mamba": (hf.MambaConfig, hf.MambaForCausalLM, dict(state_size=8, time_step_rank=4)),
    "falcon_mamba": (hf.FalconMambaConfig, hf.FalconMambaForCausalLM, dict(state_size=8, time_step_rank=4)),
    "jamba": (
        hf.JambaConfig,
        hf.JambaForCausalLM,
        dict(
            attn_layer_offset=1,
            attn_layer_period=3,
            expert_layer_offset=1,
            expert_layer_period=2,
            num_experts=4,
            mamba_d_state=8,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
    ),
    "recurrent_gemma": (
        hf.RecurrentGemmaConfig,
        hf.RecurrentGemmaForCausalLM,
        dict(head_dim=12, block_types=["recurrent", "attention"], lru_width=48, attention_window_size=20),
    ),
    "zaya": (
        hf.ZayaConfig,
        hf.ZayaForCausalLM,
        EXPERTS
        | dict(
            layer_types=["hybrid", "hybrid_sliding", "hybrid"],
            sliding_window=20,
            head_dim=16,
            num_experts_per_tok=1,
            router_hidden_size=16,
            cca_time1=3,
            attention_bias=True,
        ),
    ),
    "minimax": (
        hf.MiniMaxConfig,
        hf.MiniMaxForCausalLM,
        dict(layer_types=LAYERS, head_dim=12, num_local_experts=4, num_experts_per_tok=2, block_size=8),
    ),
    "kimi_linear": (
        hf.KimiLinearConfig,
        hf.KimiLinearForCausalLM,
        EXPERTS
        | dict(
            layer_types=LAYERS,
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=None,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=12,
            linear_head_dim=12,
            linear_num_heads=4,
            num_local_experts=4,
            n_shared_experts=1,
        ),
    ),
    "zamba": (
        hf.ZambaConfig,
        hf.ZambaForCausalLM,
        dict(
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_d_state=8,
            mamba_dt_rank=4,
            n_mamba_heads=2,
            attention_head_dim=24,
        ),
    ),
    "zamba2": (
        hf.Zamba2Config,
        hf.Zamba2ForCausalLM,
        dict(
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_d_state=16,
            mamba_expand=2,
            mamba_ngroups=2,
            n_mamba_heads=8,
            mamba_headdim=12,
            num_mem_blocks=1,
            use_mem_rope=True,
            adapter_rank=8,
            chunk_size=16,
        ),
    ),
}
PROMPT_LENGTH, CHUNK, STEPS = 30, 16, 64


def random_model(name, **more_changes):
    torch.manual_seed(0)
    config_class, model_class, changes = FAMILIES[name]
    model = model_class(config_class(**SMALL | changes | more_changes)).eval()
    for name, parameter in model.named_parameters():  # large weights, so that different models give different answers
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        elif name.endswith(".temp"):  # the scale of the keys of ZAYA, which begins at 0
            torch.nn.init.ones_(parameter)
    return model


def prompt_of(seed):
    return torch.randint(1, 256, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(seed))


def greedy(model, prompt, steps):
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = None
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=steps, pad_token_id=0)
    return tokens[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers(name):
    """The last of three rows gets a prompt in two chunks and decode steps. The first row decodes another sequence."""
    model, steps = random_model(name), 20
    prompt, other = prompt_of(1), prompt_of(2)
    expected = greedy(model, prompt, steps)
    use_gathered_experts(model)
    decoder = CachedDecoder(model, rows=3, max_context_len=64, chunk=CHUNK).eval()
    last, first = torch.tensor([2]), torch.tensor([0])
    with torch.no_grad():
        decoder(other[:, :CHUNK], torch.tensor([0]), last)  # the earlier state of the row must not matter
        decoder(prompt[:, :CHUNK], torch.tensor([0]), last)
        decoder(other[:, :5], torch.tensor([0]), first)
        answer = [int(decoder(prompt[:, CHUNK:], torch.tensor([CHUNK]), last)[0, -1].argmax())]
        for step in range(steps - 1):
            # The third entry repeats the second, as in a step with fewer requests than rows.
            tokens = torch.tensor([[step, answer[-1], answer[-1]]])
            positions = torch.tensor([5 + step, PROMPT_LENGTH + step, PROMPT_LENGTH + step])
            logits = decoder(tokens, positions, torch.tensor([0, 2, 2]), all_positions=True)
            answer.append(int(logits[0, 1].argmax()))
    assert len(set(expected)) > 5
    assert answer == expected


@pytest.mark.parametrize("name", ["qwen3_5", "zamba2", "kimi_linear"])
def test_check_in_bfloat16_allows_rounding(name):
    """In bfloat16, rounding changes the logits of these models by a third of their magnitude or more."""
    model = random_model(name).to(torch.bfloat16)
    reference = Reference.of(model, 64)
    use_gathered_experts(model)
    decoder = CachedDecoder(model, max_context_len=64, chunk=CHUNK).eval()
    reference.check(decoder)
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    with pytest.raises(ValueError, match="gives other logits over the caches"):
        reference.check(decoder)


@pytest.mark.parametrize(
    "name, changes", [("mamba", {}), ("mamba2", {"head_dim": 16}), ("falcon_mamba", {}), ("jamba", {})]
)
def test_a_quantized_model_answers_like_one_with_the_dequantized_weights(name, changes, tmp_path):
    """These models read attributes of quantized layers: they cast to `lm_head.weight.dtype` or use `dt_proj.weight`."""
    model = random_model(name, hidden_size=64, **changes)
    dequantized = copy.deepcopy(model)
    quantize_model(model, 8, 32)
    assert isinstance(model.lm_head, MLXLinear)
    weights = {path: m.dequantized() for path, m in model.named_modules() if hasattr(m, "dequantized")}
    parameters = dequantized.state_dict()
    dequantized.load_state_dict(
        {path if path in parameters else f"{path}.weight": weight for path, weight in weights.items()}, strict=False
    )
    expected = greedy(dequantized, prompt_of(1), 20)
    exported = export_llm(model, chunk=CHUNK, head=HeadConfig.minimal(), max_context_len=64, verify=False)
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    answer = LLM.load(tmp_path / "model.pte").generate(prompt_of(1)[0].tolist(), max_new_tokens=20).result()
    assert len(set(expected)) > 5 and answer.tokens == expected


@pytest.fixture(scope="module", params=["qwen3_5", "falcon_h1"])
def exported(request, tmp_path_factory):
    """A model, the result of its export with two rows, and the file. The states of the first model can be rewound."""
    model = random_model(request.param)
    path = tmp_path_factory.mktemp("state") / "model.pte"
    result = export_llm(
        copy.deepcopy(model), chunk=CHUNK, head=HeadConfig.minimal(), max_context_len=2 * STEPS, batch=2
    )
    result.save(path)
    return model, result, path


def test_an_exported_model(exported, tmp_path):
    model, result, path = exported
    assert result.report.refused == ()
    assert result.check.ok
    can_rewind = model.config.model_type == "qwen3_5_text"
    assert result.methods == ("prefill", "decode") + (("verify", "rewind") if can_rewind else ())
    assert result.metadata["get_max_rewind"] == 0
    llm = LLM.load(path)
    prompts = [prompt_of(seed)[0].tolist() for seed in (1, 2, 3)]
    expected = [greedy(model, torch.tensor([prompt]), STEPS) for prompt in prompts]
    answers = llm.generate_batch(prompts, max_new_tokens=STEPS)
    assert [answer.tokens for answer in answers] == expected
    assert len(set(expected[0])) > 5

    # A row continues at its end. The row lacks only the last token of the answer.
    part = llm.generate(prompts[0], max_new_tokens=10).result()
    longer = prompts[0] + part.tokens
    answer = llm.generate(longer, max_new_tokens=STEPS - 10).result()
    assert answer.tokens == expected[0][10:]
    assert answer.metrics.cached_tokens == len(longer) - 1

    # A row with a state cannot be rewound. A prompt with another ending is computed from its start.
    answer = llm.generate(prompts[0][:20] + prompts[1][20:], max_new_tokens=STEPS).result()
    assert answer.metrics.cached_tokens == 0
    assert answer.tokens == greedy(model, torch.tensor([prompts[0][:20] + prompts[1][20:]]), STEPS)

    # The file of a prefix has the state after the last token of the prefix.
    llm.save_prefix(prompts[1][:18], tmp_path / "prefix")
    llm = LLM.load(path)
    assert llm.load_prefix(tmp_path / "prefix") == 18
    answer = llm.generate(prompts[1], max_new_tokens=STEPS).result()
    assert answer.metrics.cached_tokens == 18
    assert answer.tokens == expected[1]
