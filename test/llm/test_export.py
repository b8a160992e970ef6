"""A Hugging Face model exported with KV caches and the sampling head, against transformers."""

import gc
import json

import pytest
import torch
from executorch_mlx import Runtime
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export.survey import survey
from executorch_mlx.llm.export.weights import load_causal_lm
from loaded_method import LoadedMethod
from row_programs import RowProgram
from tokenizers import Tokenizer, models
from torch.export import ExportedProgram
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
def path(exported, tmp_path_factory):
    path = tmp_path_factory.mktemp("llm") / "model.pte"
    exported.save(path)
    return path


@pytest.fixture(scope="module")
def llm(path):
    return LLM.load(path)


@pytest.fixture(scope="module")
def step(path):
    """A function: `step(tokens, position)` calls the program and returns the drawn token."""
    return stepper(path, HeadConfig())


def stepper(path, head):
    program = RowProgram(path, head, SMALL["vocab_size"])
    return lambda tokens, position, **parameters: program.prefill(tokens, position, **parameters)[0].item()


def test_every_node_is_delegated_in_one_call(exported):
    assert exported.report.refused == ()
    methods = exported.program.executorch_program.execution_plan
    forward = next(plan for plan in methods if plan.name == "forward")
    assert len(forward.delegates) == 1
    assert len(forward.chains[0].instructions) == 1


def test_greedy_equals_transformers(llm):
    model = small_llama()
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, pad_token_id=0)[
        0, len(PROMPT) :
    ].tolist()
    stop = next((i for i, t in enumerate(expected) if t in llm.eos_ids), len(expected))
    assert len(set(expected[:stop])) > 5
    assert llm.generate(PROMPT, max_new_tokens=40).result().tokens == expected[:stop]


def test_a_prompt_in_chunks_gives_the_same_token(step):
    whole = step(PROMPT, 0)
    step(PROMPT[:2], 0)
    step(PROMPT[2:3], 2)
    assert step(PROMPT[3:], 3) == whole


def test_the_seed_determines_the_tokens(llm):
    settings = dict(max_new_tokens=20, temperature=1.0, top_k=50, top_p=0.95, ignore_eos=True)
    draws = [llm.generate(PROMPT, seed=seed, **settings).result().tokens for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and len(draws[0]) == 20


def test_metadata(llm):
    program = llm.program
    assert (program.chunk, program.vocab_size, program.rows, program.eos_ids) == (48, 300, 1, {298, 299})
    assert (program.has_head, program.has_logits, program.has_verify) == (True, False, True)
    assert [program.get(name) for name in ("get_bos_id", "use_kv_cache", "sampling_head")] == [0, 1, 1]
    assert program.get("get_nothing", 5) == 5 and program.data("token_bytes") is None


def test_stop_ids_outside_the_vocabulary_have_no_effect(llm, tmp_path):
    """The config of a small model may keep the default ids of its family, which belong to a larger vocabulary."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [299, 151336]}')
    Tokenizer(models.WordLevel({"</s>": 151329})).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    loaded = LLM.load(llm.program.path, tokenizer=tmp_path)
    assert loaded.eos_ids == {298, 299}
    answers = [model.generate(PROMPT, max_new_tokens=4).result().tokens for model in (llm, loaded)]
    assert answers[0] == answers[1]


def test_an_answer_ends_when_the_context_is_full(llm):
    result = llm.generate([1] * 40, max_new_tokens=100, temperature=5.0, seed=3, ignore_eos=True).result()
    assert result.finish == "context"
    assert len(result.tokens) == 48 - 40 + 1  # the last token is drawn, but has no position


@pytest.mark.parametrize("length", [0, 49])
def test_a_prompt_of_wrong_length_is_refused(llm, length):
    with pytest.raises(ValueError, match=f"prompt: got {length} tokens, expected 1 to 48"):
        llm.generate([1] * length, max_new_tokens=1).result()


def test_a_write_beyond_the_cache_fails_and_keeps_the_cache(step):
    before = step(PROMPT, 0)
    with pytest.raises(RuntimeError):
        step(PROMPT, 45)
    assert step(PROMPT[-1:], len(PROMPT) - 1) == before


@pytest.mark.parametrize("length", [1, 49])
def test_max_context_len_out_of_range_is_refused(length):
    with pytest.raises(ValueError, match=f"max_context_len: got {length}, expected 2 to 48"):
        export_llm(small_llama(), max_context_len=length)


@pytest.mark.parametrize(
    "rope, limit",
    [
        (dict(rope_type="linear", factor=4.0), 192),
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), 128),
        (dict(rope_type="yarn", factor=1.5, original_max_position_embeddings=24), 48),
    ],
)
def test_max_context_len_includes_the_positions_of_the_rotary_scaling(rope, limit):
    with pytest.raises(ValueError, match=f"max_context_len: got 999, expected 2 to {limit}"):
        export_llm(small_llama(rope_parameters=rope | {"rope_theta": 1e4}), max_context_len=999)


def test_a_minimal_head_has_two_inputs(tmp_path):
    exported = export_llm(small_llama(), head=HeadConfig.minimal())
    exported.save(tmp_path / "model.pte")
    forward = Runtime.get().load_program(tmp_path / "model.pte").metadata("forward")
    assert forward.num_inputs() == 4  # tokens, input_pos, temperature, top_p
    assert isinstance(stepper(tmp_path / "model.pte", HeadConfig.minimal())(PROMPT, 0, temperature=1.0), int)


def test_logits_equal_transformers(tmp_path):
    exported = export_llm(small_llama(), outputs="logits")
    exported.save(tmp_path / "model.pte")
    (logits,) = LoadedMethod(tmp_path / "model.pte").execute([torch.tensor([PROMPT]), torch.tensor([0])])
    with torch.no_grad():
        expected = small_llama()(torch.tensor([PROMPT])).logits[:, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_settings_of_a_run_have_no_effect(tmp_path):
    """FlashAttention is not installed, and results that are tuples lack the names of their parts."""
    model = small_llama()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = {"_attn_implementation": "flash_attention_2", "return_dict": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert survey(tmp_path).obstacle is None
    loaded = load_causal_lm(tmp_path)
    assert loaded(torch.tensor([PROMPT])).logits.equal(model(torch.tensor([PROMPT])).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_draws_a_most_likely_token(tmp_path, dtype):
    exported = export_llm(small_llama(), dtype=dtype)
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    decoder = CachedDecoder(small_llama().to(dtype), max_context_len=48)
    with torch.no_grad():
        logits = decoder(torch.tensor([PROMPT]), torch.tensor([0]))[0, -1].float()
    token = stepper(tmp_path / "model.pte", HeadConfig())(PROMPT, 0)
    # Rounding may swap tokens with almost equal logits.
    assert logits.max() - logits[token] < 0.02


def test_an_export_leaves_no_program_in_memory():
    """Caches of torch and ExecuTorch would keep the exported programs, and with them the weights of the model."""

    def programs():
        gc.collect()
        return sum(isinstance(x, ExportedProgram) for x in gc.get_objects())

    before = programs()
    export_llm(small_llama(), verify=False)
    assert programs() <= before
