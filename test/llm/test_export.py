"""A Hugging Face model, exported with its cache and the sampling head, against transformers."""

import pytest
import torch
from executorch.runtime import Runtime
from executorch_mlx.llm import LLM
from executorch_mlx import load_delegate
from executorch_mlx.llm.decoder import CachedDecoder
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.parameters import Sampling
from executorch_mlx.llm.program import LLMProgram
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
    max_position_embeddings=48,
    bos_token_id=0,
    eos_token_id=[298, 299],
)
PROMPT = [5, 17, 200, 3, 77]


def small_llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL | changes)).eval()


@pytest.fixture(scope="module")
def exported():
    return export_llm(small_llama())


@pytest.fixture(scope="module")
def program(exported, tmp_path_factory):
    path = tmp_path_factory.mktemp("llm") / "model.pte"
    exported.save(path)
    return LLMProgram(path)


def test_every_node_is_delegated_in_one_call(exported):
    assert exported.report.refused == ()
    methods = exported.program.executorch_program.execution_plan
    forward = next(plan for plan in methods if plan.name == "forward")
    assert len(forward.delegates) == 1
    assert len(forward.chains[0].instructions) == 1


def test_greedy_equals_transformers(program):
    model = small_llama()
    model.generation_config.eos_token_id = None
    expected = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    stop = next((i for i, t in enumerate(expected) if t in program.eos_ids), len(expected))
    assert LLM(program).generate(PROMPT, max_new_tokens=40).result().tokens == expected[:stop]


def test_prompt_may_come_in_pieces(program):
    whole = program.step(PROMPT, 0)
    program.step(PROMPT[:2], 0)
    program.step(PROMPT[2:3], 2)
    assert program.step(PROMPT[3:], 3) == whole


def test_same_seed_same_tokens_and_another_seed_others(program):
    settings = dict(max_new_tokens=20, temperature=1.0, top_k=50, top_p=0.95)
    draws = [LLM(program).generate(PROMPT, seed=seed, **settings).result().tokens for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_metadata(program):
    assert program.get("get_max_seq_len") == 48
    assert program.get("get_vocab_size") == 300
    assert program.get("get_bos_id") == 0
    assert program.eos_ids == {298, 299}
    assert program.get("use_kv_cache") is True
    assert program.get("sampling_head") is True


def test_generation_ends_at_the_capacity(program):
    tokens = LLM(program).generate([1] * 40, max_new_tokens=100, temperature=5.0, seed=3).result().tokens
    assert len(tokens) <= 48 - 40 + 1


@pytest.mark.parametrize("length", [0, 49])
def test_prompt_length_is_checked(program, length):
    with pytest.raises(ValueError, match=f"the prompt has {length} tokens, expected 1 to 48"):
        LLM(program).generate([1] * length, max_new_tokens=1).result().tokens


def test_write_beyond_the_cache_is_an_error_and_loses_nothing(program):
    before = program.step(PROMPT, 0)
    with pytest.raises(RuntimeError):
        program.step(PROMPT, 45)
    assert program.step(PROMPT[-1:], len(PROMPT) - 1) == before


@pytest.mark.parametrize("length", [1, 49])
def test_max_seq_len_is_checked(length):
    with pytest.raises(ValueError, match=f"max_seq_len is {length}, expected 2 to 48"):
        export_llm(small_llama(), max_seq_len=length)


def test_parameters_that_are_off_are_no_inputs(tmp_path):
    exported = export_llm(small_llama(), sampling=Sampling(seed=False, top_k=False, min_p=False))
    exported.save(tmp_path / "model.pte")
    program = LLMProgram(tmp_path / "model.pte")
    forward = program._program.metadata("forward")
    assert forward.num_inputs() == 4
    assert isinstance(program.step(PROMPT, 0, temperature=1.0), int)


def test_logits_without_a_head(tmp_path):
    exported = export_llm(small_llama(), outputs="logits")
    exported.save(tmp_path / "model.pte")
    load_delegate()
    program = Runtime.get().load_program(tmp_path / "model.pte")
    (logits,) = program.load_method("forward").execute([torch.tensor([PROMPT]), torch.tensor([0])])
    with torch.no_grad():
        expected = small_llama()(torch.tensor([PROMPT])).logits[:, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(tmp_path, dtype):
    exported = export_llm(small_llama(), dtype=dtype)
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    program = LLMProgram(tmp_path / "model.pte")
    decoder = CachedDecoder(small_llama().to(dtype), batch=1, max_seq_len=48)
    with torch.no_grad():
        logits = decoder(torch.tensor([PROMPT]), torch.tensor([0]))[0, -1].float()
    token = program.step(PROMPT, 0)
    # Half precision may swap tokens that are all but tied.
    assert logits.max() - logits[token] < 0.02
