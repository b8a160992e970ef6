"""Families with other caches or another attention than test_families.py. Greedy tokens equal those of transformers.

One family of each kind is exported. The others run in eager torch, in the module that an export would lower.
"""

import copy

import pytest
import torch
import transformers as hf
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.precision import cast_parameters
from executorch_mlx.llm.export.reference import Reference
from executorch_mlx.llm.export.survey import survey
from test_families import ALTERNATING, FAMILIES, SMALL, greedy, random_model

LATENT = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10
)
ROUTED = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
GPT = dict(n_embd=48, n_head=4, n_layer=2, n_positions=128)

CHUNK, STEPS = 16, 64
PROMPT = torch.randint(1, 256, (1, 30), generator=torch.Generator().manual_seed(1))

# Name → config class, model class, changes of `SMALL`, and the number of rows.
EXPORTED = {
    "latent attention": (hf.DeepseekV3Config, hf.DeepseekV3ForCausalLM, LATENT | ROUTED, 2),
    "sinks": (
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=12, layer_types=ALTERNATING),
        2,
    ),
    "chunked attention": (
        hf.Llama4TextConfig,
        hf.Llama4ForCausalLM,
        dict(
            head_dim=16,
            attention_chunk_size=12,
            no_rope_layers=[1, 0],
            num_local_experts=4,
            intermediate_size_mlp=64,
            interleave_moe_layer_step=2,
            floor_scale=8,
        ),
        2,
    ),
    "shared caches": (
        hf.Gemma4TextConfig,
        hf.Gemma4ForCausalLM,
        dict(
            head_dim=16,
            global_head_dim=24,
            num_hidden_layers=4,
            layer_types=ALTERNATING * 2,
            num_kv_shared_layers=2,
            sliding_window=12,
            vocab_size_per_layer_input=256,
            hidden_size_per_layer_input=8,
        ),
        1,
    ),
    "sparse activations": (
        hf.Gemma3nTextConfig,
        hf.Gemma3nForCausalLM,
        dict(
            head_dim=16,
            vocab_size_per_layer_input=256,
            hidden_size_per_layer_input=8,
            num_hidden_layers=4,
            layer_types=ALTERNATING * 2,
            num_kv_shared_layers=2,
            sliding_window=12,
            laurel_rank=8,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        ),
        1,
    ),
    "linear biases": (hf.BloomConfig, hf.BloomForCausalLM, dict(n_layer=2, n_head=4, tie_word_embeddings=False), 2),
    "own attention": (hf.GPTJConfig, hf.GPTJForCausalLM, GPT | dict(rotary_dim=8), 1),
}
BLOCKS = dict(
    layer_types=["full_attention", "minimax_m3_sparse"], index_block_size=8, index_head_dim=16, index_n_heads=2
)
INDEXED = LATENT | ROUTED | dict(index_topk=PROMPT.shape[1] + STEPS, index_head_dim=16, index_n_heads=2)
IN_EAGER_TORCH = {
    "deepseek_v32, indexed attention": (hf.DeepseekV32Config, hf.DeepseekV32ForCausalLM, INDEXED),
    "glm_moe_dsa, a shared index": (
        hf.GlmMoeDsaConfig,
        hf.GlmMoeDsaForCausalLM,
        INDEXED | dict(indexer_types=["full", "shared"]),
    ),
    "minimax_m3, an index of blocks": (
        hf.MiniMaxM3VLTextConfig,
        hf.MiniMaxM3VLForCausalLM,
        BLOCKS
        | dict(
            mlp_layer_types=["dense", "sparse"],
            dense_intermediate_size=64,
            shared_intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=16,
            rotary_dim=8,
        ),
    ),
    "deepseek_v2, one query projection": (
        hf.DeepseekV2Config,
        hf.DeepseekV2ForCausalLM,
        LATENT | ROUTED | dict(q_lora_rank=None),
    ),
    "longcat, two caches a layer": (
        hf.LongcatFlashConfig,
        hf.LongcatFlashForCausalLM,
        LATENT
        | dict(
            head_dim=8,
            num_layers=2,
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=2,
            expert_ffn_hidden_size=32,
            ffn_hidden_size=64,
        ),
    ),
    "glm4_moe_lite": (hf.Glm4MoeLiteConfig, hf.Glm4MoeLiteForCausalLM, LATENT | ROUTED),
    "mpt": (hf.MptConfig, hf.MptForCausalLM, dict(d_model=48, n_heads=4, n_layers=2, max_seq_len=128)),
    "falcon": (hf.FalconConfig, hf.FalconForCausalLM, dict(multi_query=True)),
    "falcon, linear biases": (hf.FalconConfig, hf.FalconForCausalLM, dict(alibi=True, multi_query=False)),
    "gpt_bigcode": (hf.GPTBigCodeConfig, hf.GPTBigCodeForCausalLM, GPT),
    "codegen": (hf.CodeGenConfig, hf.CodeGenForCausalLM, GPT | dict(rotary_dim=8, n_ctx=128)),
    "doge, a bias of the keys": (
        hf.DogeConfig,
        hf.DogeForCausalLM,
        dict(keep_window_size=PROMPT.shape[1] + STEPS, attention_bias=True),
    ),
    "hrm_text, layers that run several times": (hf.HrmTextConfig, hf.HrmTextForCausalLM, dict(head_dim=16)),
    "jetmoe, experts of attention heads": (
        hf.JetMoeConfig,
        hf.JetMoeForCausalLM,
        dict(kv_channels=12, num_local_experts=4, num_experts_per_tok=2),
    ),
    "dbrx": (
        hf.DbrxConfig,
        hf.DbrxForCausalLM,
        dict(
            d_model=48,
            n_heads=4,
            n_layers=2,
            max_seq_len=128,
            attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
            ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
        ),
    ),
    "xglm, scores whose shape is checked": (
        hf.XGLMConfig,
        hf.XGLMForCausalLM,
        dict(d_model=48, ffn_dim=64, num_layers=2, attention_heads=4, tie_word_embeddings=False),
    ),
    "gpt_neo": (
        hf.GPTNeoConfig,
        hf.GPTNeoForCausalLM,
        dict(num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4, window_size=12),
    ),
    "bart, positions from the number of cached tokens": (
        hf.BartConfig,
        hf.BartForCausalLM,
        dict(
            d_model=48,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            is_encoder_decoder=False,
            is_decoder=True,
            forced_eos_token_id=None,
        ),
    ),
    "roformer, rotations by the number of cached tokens": (
        hf.RoFormerConfig,
        hf.RoFormerForCausalLM,
        dict(is_decoder=True, rotary_value=True),
    ),
}


def tokens_of(decoder, prompt):
    """Return the greedy tokens of row 1: a prompt in chunks, then decode steps, in which row 0 gets a fixed token."""
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


@pytest.mark.parametrize("name", EXPORTED)
def test_greedy_of_an_exported_model_equals_transformers(name, tmp_path):
    *family, rows = EXPORTED[name]
    model = random_model(*family)
    expected = greedy(copy.deepcopy(model), PROMPT)[0].tolist()
    exported = export_llm(
        model, chunk=CHUNK, head=HeadConfig.minimal(), max_context_len=PROMPT.shape[1] + STEPS, batch=rows
    )
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    llm = LLM.load(tmp_path / "model.pte")
    assert len(set(expected)) > 5
    assert llm.generate(PROMPT[0].tolist(), max_new_tokens=STEPS).result().tokens == expected
    # Again, from the cached prompt, in all rows at once.
    answers = llm.generate_batch([PROMPT[0].tolist()] * rows, max_new_tokens=STEPS)
    assert [answer.tokens for answer in answers] == [expected] * rows
    has_ring = exported.metadata["get_max_rewind"] < STEPS
    assert has_ring or max(answer.metrics.cached_tokens for answer in answers) > 0
    if name == "latent attention":
        assert exported.cache_values_per_token == (16 + 8,) * 2  # kv_lora_rank + qk_rope_head_dim


@torch.no_grad()
@pytest.mark.parametrize("name", IN_EAGER_TORCH)
def test_greedy_in_eager_torch_equals_transformers(name):
    model = random_model(*IN_EAGER_TORCH[name])
    expected = greedy(copy.deepcopy(model), PROMPT)[0].tolist()
    use_gathered_experts(model)
    reference = Reference.of(model, 24)
    decoder = CachedDecoder(model, rows=2, max_context_len=PROMPT.shape[1] + STEPS, chunk=CHUNK).eval()
    reference.check(decoder)
    assert len(set(expected)) > 5
    assert tokens_of(decoder, PROMPT) == expected


@pytest.mark.parametrize("name", FAMILIES | EXPORTED | IN_EAGER_TORCH)
def test_a_survey_without_weights_finds_no_obstacle(name, tmp_path):
    config_class, _, changes, *_ = (FAMILIES | EXPORTED | IN_EAGER_TORCH)[name]
    config_class(**SMALL | changes).save_pretrained(tmp_path)
    assert survey(tmp_path).obstacle is None


def test_a_survey_of_a_model_that_looks_for_padding(tmp_path):
    """GPT-2 compares its first and last token with `pad_token_id`."""
    hf.GPT2Config(**GPT, vocab_size=256, bos_token_id=0, eos_token_id=1, pad_token_id=1).save_pretrained(tmp_path)
    assert survey(tmp_path).obstacle is None


def test_the_context_of_indexed_attention_is_limited(tmp_path):
    """In a context of `index_topk` positions, a query attends to all keys."""
    config = hf.DeepseekV32Config(**SMALL | INDEXED | dict(index_topk=16))
    with pytest.raises(
        ValueError, match="max_context_len: got 17, expected at most 16: in a longer context, DeepseekV32"
    ):
        export_llm(hf.DeepseekV32ForCausalLM(config), max_context_len=17)
    exported = export_llm(hf.DeepseekV32ForCausalLM(config).eval(), outputs="logits")
    assert exported.metadata["get_max_context_len"] == 16 and exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    assert exported.check.ok
    config.save_pretrained(tmp_path)
    assert survey(tmp_path).obstacle is None


@pytest.mark.parametrize("name, dtype", [("latent attention", torch.bfloat16), ("sinks", torch.float16)])
def test_parameters_that_transformers_keeps_in_float32_stay_float32(name, dtype, tmp_path):
    model = random_model(*EXPORTED[name][:3])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    cast_parameters(model, dtype)
    dtypes = {path: parameter.dtype for path, parameter in model.named_parameters()}
    assert dtypes == {path: parameter.dtype for path, parameter in loaded.named_parameters()}
    assert set(dtypes.values()) == {dtype, torch.float32}
