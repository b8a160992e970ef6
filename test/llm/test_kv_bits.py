"""`export_llm(kv_bits=)`: quantized KV caches in the engine."""

import pytest
import torch
from executorch_mlx import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.serialization.read import read_payload
from loaded_method import LoadedMethod
from test_chunks import assert_chunks_do_not_matter
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

PROMPT = torch.randint(2, 300, (150,), generator=torch.Generator().manual_seed(1)).tolist()
SHAPE = dict(
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=40,
    vocab_size=300,
    num_hidden_layers=2,
    max_position_embeddings=512,
    initializer_range=0.3,
    eos_token_id=None,
)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=20)).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The path of a program with 8-bit KV caches and two rows, and what `export_llm` returned."""
    path = tmp_path_factory.mktemp("kv") / "model.pte"
    result = export_llm(llama(), kv_bits=8, batch=2, chunk=32, outputs="both")
    result.save(path)
    return path, result


def test_the_export_reports_the_error_and_agrees_with_eager_torch(exported):
    _, result = exported
    quantization = result.kv_quantization
    assert (quantization.bits, quantization.layers, quantization.perplexity) == (8, 2, None)
    assert 1e-4 < quantization.error < 1e-2 and 0 < quantization.logits < 0.1
    assert result.check.ok and result.report.refused == ()
    # 2 layers, 2 rows, 512 positions, 2 key heads. An entry has two groups for the key and two for the value, each with
    # 32 bytes, a scale and a bias.
    assert result.cache_bytes == 2 * 2 * 512 * 2 * (4 * 32 + 4 * 2 * 4)
    assert result.cache_values_per_token == (160, 160)


def test_answers_do_not_depend_on_rows_reuse_drafts_or_saved_prefixes(exported, tmp_path):
    llm = LLM.load(exported[0])
    settings = dict(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
    alone = llm.generate(PROMPT, **settings, draft=0).result().tokens
    together = [llm.generate(p, **settings) for p in (PROMPT[:40], PROMPT, PROMPT[5:])]
    assert together[1].result().tokens == alone
    for answer in together:
        answer.result()
    reused = llm.generate(PROMPT, **settings, draft=4).result()
    assert reused.tokens == alone and reused.metrics.cached_tokens > 0
    llm.save_prefix(PROMPT[:100], tmp_path / "cache")
    with LLM.load(exported[0]) as other:
        assert other.load_prefix(tmp_path / "cache") == 100
        answer = other.generate(PROMPT, **settings).result()
    assert answer.tokens == alone and answer.metrics.cached_tokens == 100


NODES = ("QuantizeEntriesNode", "QuantizedSdpaNode")


def mixed():
    """A model with two kinds of caches: a layer with a sliding window, and a layer without one."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    return Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=20, max_window_layers=1, layer_types=kinds)
    ).eval()


@pytest.mark.parametrize("model, bits", [(llama, 8), (llama, 4), (mixed, 8)], ids=["8", "4", "mixed"])
def test_a_portable_program_gives_the_tokens_of_one_with_extensions(model, bits, tmp_path):
    tokens = {}
    for extensions in (False, True):
        result = export_llm(model(), kv_bits=bits, allow_extensions=extensions, batch=2, chunk=32, verify=False)
        result.save(path := tmp_path / f"{extensions}.pte")
        in_chains, replacements = nodes_by_method(result)
        assert {"prefill", "decode", "verify"} <= set(in_chains)
        for method, names in (in_chains if extensions else replacements).items():
            # For each of the two layers, a call quantizes once, and attends once in each row that it has tokens of.
            rows = 2 if method == "decode" else 1
            assert [names.count(name) for name in NODES] == [2, 2 * rows], method
            assert not set((replacements if extensions else in_chains)[method]) & set(NODES), method
        with LLM.load(path) as llm:
            settings = dict(max_new_tokens=20, ignore_eos=True, temperature=0.8)
            # Two requests side by side, then the same prompt with draft tokens.
            answers = [llm.generate(p, **settings, seed=3) for p in (PROMPT[:40], PROMPT)]
            tokens[extensions] = [answer.result().tokens for answer in answers]
            tokens[extensions].append(llm.generate(PROMPT + PROMPT, **settings, seed=4, draft=4).result().tokens)
    assert tokens[False] == tokens[True]
    assert len(set(tokens[False][2])) > 5


def nodes_by_method(exported):
    """Return the names of the nodes in the chains of each method, and of those in its replacements."""
    program = exported.program.executorch_program
    payloads = [bytes(data.data) for data in program.backend_delegate_data]
    in_chains, replacements = {}, {}
    for plan in program.execution_plan:
        if plan.delegates:
            (delegate,) = plan.delegates
            graph = read_payload(payloads[delegate.processed.index])
            in_chains[plan.name] = [i.op.NAME for chain in graph.instruction_chains for i in chain.instructions]
            replacements[plan.name] = [r.instruction.op.NAME for r in graph.replacements or ()]
    return in_chains, replacements


@pytest.mark.parametrize("bits, extensions", [(4, True), (8, False)])
def test_chunks_do_not_matter_in_a_ring_buffer(bits, extensions, tmp_path):
    result = export_llm(
        mistral(), kv_bits=bits, allow_extensions=extensions, chunk=64, max_context_len=128, outputs="logits"
    )
    result.save(tmp_path / "model.pte")  # compares the logits with eager torch
    assert_chunks_do_not_matter(LoadedMethod(tmp_path / "model.pte"))


def test_16_bits_are_half_precision(tmp_path):
    results = {}
    for bits in (16, None):
        results[bits] = export_llm(llama(), kv_bits=bits, batch=2, chunk=32)
        results[bits].save(tmp_path / f"{bits}.pte")  # compares with eager torch
    assert results[16].check.ok and results[16].kv_quantization is None
    assert results[16].cache_bytes * 2 == results[None].cache_bytes
    with LLM.load(tmp_path / "16.pte") as llm:
        settings = dict(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
        alone = llm.generate(PROMPT, **settings, draft=0).result().tokens
        together = [llm.generate(p, **settings) for p in (PROMPT[:40], PROMPT)]
        assert [answer.result().tokens for answer in together][1] == alone


def test_16_bits_do_not_change_a_model_in_half_precision():
    result = export_llm(llama().to(torch.bfloat16), kv_bits=16, verify=False)
    assert result.cache_bytes == export_llm(llama().to(torch.bfloat16), verify=False).cache_bytes


def test_4_bits_are_rotated_where_keys_have_outliers():
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[3] *= 30
    quantization = export_llm(model, kv_bits=4, allow_extensions=True, verify=False, head=HeadConfig()).kv_quantization
    assert quantization.rotated == 2


def test_bits_are_checked():
    with pytest.raises(ValueError, match="kv_bits: got 5, expected 16, 8, 4"):
        export_llm(llama(), kv_bits=5)
