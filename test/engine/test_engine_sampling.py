"""The sampling head and the host draw the same tokens, with every sampling parameter."""

import llm_programs as programs
import pytest
import torch
from executorch_mlx.llm import LLM
from executorch_mlx.llm.scoring import Classifier
from transformers import LlamaConfig, LlamaForCausalLM

# With filters, the noise of a token depends on its rank: ranks from 0, from 256 and from 2048 on use different seeds.
# This vocabulary is large enough for all three.
VOCABULARY = 3000
PROMPT = [5, 900, 17, 2999, 4]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """`exported(name, **options)` exports a small model with fixed random weights."""
    from executorch_mlx.llm.export import export_llm

    folder = tmp_path_factory.mktemp("sampling")

    def make(name, **options):
        path = folder / f"{name}.pte"
        if not path.exists():
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                bos_token_id=None,
                eos_token_id=None,
                initializer_range=0.3,
            )
            export_llm(LlamaForCausalLM(config), chunk=8, verify=False, speculation=False, **options).save(path)
        return path

    return make


@pytest.fixture(scope="module")
def full(exported):
    """A program whose head takes all parameters."""
    from executorch_mlx.llm.export import HeadConfig

    return exported("full", outputs="both", head=HeadConfig(penalties=16, logit_bias=3, allowed_tokens=True))


@pytest.fixture(scope="module")
def bare(exported):
    """A program whose head does not take top_k and other parameters. The host draws for requests that set them."""
    from executorch_mlx.llm.export import HeadConfig

    return exported("bare", outputs="both", head=HeadConfig(penalties=16, top_k=False, min_p=False))


def test_token_without_a_probability_scores_minus_infinity(tmp_path):
    table = torch.arange(256) / 64
    table[7], table[8], table[9] = -torch.inf, torch.nan, torch.inf

    def rule(self, tokens, input_pos):
        return self.table[None].clone()

    path = tmp_path / "logits.pte"
    programs.export(path, rule, state={"table": table}, parameters=False, sampling_head=False)
    with LLM.load(path) as llm:
        scores = llm.score([5], [[7], [8], [3, 8], [9]], logprobs=2)
        assert [score.logprob for score in scores] == [-torch.inf, -torch.inf, -torch.inf, 0]
        assert [score.is_greedy for score in scores] == [False, False, False, True]
        assert [scores[0].top_logprobs[0][i][0] for i in range(2)] == [9, 255]
        impossible, possible = (
            Classifier(llm.program, {"a": [7], "b": [8]}),
            Classifier(llm.program, {"a": [7], "b": [9]}),
        )
        assert "each has a probability of 0" in str(impossible.classify([5]).error)
        assert possible.classify([5]).probabilities == {"a": 0, "b": 1}


def prompt_flags(*prompts):
    return [flag for ids in prompts for flag in ("--prompt-ids", ",".join(map(str, ids)))]


def flags(settings):
    formats = {"logit_bias": lambda value: ",".join(f"{k}:{v}" for k, v in value.items())}
    return [f"--{k.replace('_', '-')}={formats.get(k, str)(v)}" for k, v in settings.items()]


SETTINGS = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": -(2**62)},
    {"temperature": 2.5, "top_p": 0.999, "seed": 2**40},
    {"temperature": 1.2, "min_p": 0.05, "seed": 3},
    {"temperature": 1.0, "top_k": 2900, "seed": 4},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 3.5, "frequency_penalty": 2.0, "temperature": 0.5, "seed": 11},
    {"logit_bias": {8: 50.0, 2998: 49.5}, "frequency_penalty": 1.0, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_host_draws_the_tokens_of_the_head(run, full, bare, settings):
    """One prompt fits into a chunk, and the other needs two. With the answer, both exceed the penalties' history."""
    settings = {"top_k": VOCABULARY} | settings  # has no effect, but the host has to draw
    for prompt in (PROMPT, PROMPT * 2):
        arguments = [*prompt_flags(prompt), "--ids", "--max-new-tokens=20", *flags(settings)]
        assert run(bare, *arguments).ids == run(full, *arguments).ids


@pytest.mark.parametrize("fixture", ["full", "bare"])
def test_only_allowed_tokens_are_drawn(run, request, fixture):
    allowed = {3, 31, 32, 2999}
    arguments = [*prompt_flags(PROMPT), "--ids", "--max-new-tokens=30", "--temperature=5", "--seed=1"]
    path = request.getfixturevalue(fixture)
    ids = run(path, *arguments, "--allow-ids", ",".join(map(str, allowed))).ids
    assert len(ids) == 30 and set(ids) == allowed


@pytest.mark.parametrize("fixture", ["full", "bare"])
@pytest.mark.parametrize("outside", [VOCABULARY, VOCABULARY + 500])
def test_a_mask_that_admits_no_token_is_an_error(run, request, fixture, outside):
    """The bit of the first id exists, beyond the vocabulary. The mask has no bit for the second one."""
    done = run(request.getfixturevalue(fixture), "--prompt-ids=5", "--ids", f"--allow-ids={outside}")
    assert done.code == 2 and "allowed_tokens: got a mask that admits no token" in done.stderr


@pytest.mark.parametrize("fixture", ["full", "bare"])
def test_no_stop_id_is_drawn_before_the_minimum(run, request, fixture):
    path = request.getfixturevalue(fixture)
    arguments = [*prompt_flags(PROMPT), "--ids", "--max-new-tokens=30", "--temperature=5", "--seed=1"]
    arguments += ["--allow-ids=3,31,32,2999", "--stop-ids=32,2999"]
    assert len(run(path, *arguments).ids) < 4
    ids = run(path, *arguments, "--min-new-tokens=12").ids
    assert 12 <= len(ids) < 30 and set(ids) == {3, 31}
    done = run(path, *arguments[:-2], "--allow-ids=32", "--stop-ids=32", "--min-new-tokens=1")
    assert done.code == 2 and "admits no token but stop ids, which min_new_tokens prevents" in done.stderr


def test_host_adds_a_bias_that_is_too_long_for_the_head(run, full):
    arguments = [*prompt_flags(PROMPT), "--ids", "--max-new-tokens=5", "--logit-bias"]
    assert run(full, *arguments, "1:1,2:1,3:1,4:100").ids == [4] * 5


# -- several prompts ------------------------------------------------------------------


def test_several_prompts_are_answered_side_by_side(run, tmp_path):
    path = programs.export_rows(tmp_path / "rows.pte", 3)
    prompts = [[1], [65, 66], [9], [200]]
    arguments = [*prompt_flags(*prompts), "--temperature=1", "--seed=5", "--max-new-tokens=4"]
    alone = [run(path, *prompt_flags(prompt), *arguments[-3:], "--ids").ids for prompt in prompts]
    lines = run(path, *arguments, "--json").json
    answers = {line["sequence"]: line for line in lines if "finish" in line}
    assert [answers[i]["tokens"] for i in range(4)] == alone
    assert [answers[i]["prompt_tokens"] for i in range(4)] == [1, 2, 1, 1]
    shown = run(path, *arguments, "--ids").stdout.splitlines()
    assert shown == [f"[{i}] {' '.join(map(str, ids))}" for i, ids in enumerate(alone)]


# -- programs without a head ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_host_samples_from_logits_of_every_dtype(run, tmp_path, dtype):
    """The most likely token is the last token plus 1, and the second most likely is the last token plus 2."""

    def logits(self, tokens, input_pos, **_):
        distance = torch.arange(256) - (tokens[:, -1:] + 1) % 256
        return torch.where(distance == 0, 4.0, torch.where(distance == 1, 3.0, -40.0)).to(dtype).unsqueeze(1)

    path = programs.export(tmp_path / "logits.pte", logits, parameters=False, sampling_head=False, max_context_len=64)
    arguments = [path, "--prompt-ids", "10", "--ids", "--max-new-tokens", "30"]
    assert run(*arguments).ids == list(range(11, 41))
    drawn = run(*arguments, "--temperature=1", "--seed=3")
    steps = {b - a for a, b in zip([10, *drawn.ids], drawn.ids)}
    assert steps == {1, 2} and "seed: 3\n" in drawn.stderr
    assert run(*arguments, "--temperature=1", "--seed=3", "--top-k=1").ids == list(range(11, 41))


def test_output_that_contradicts_the_metadata_is_an_error(run, tmp_path):
    def logits(self, tokens, input_pos, **_):
        return torch.zeros(1, 1, 256)

    path = programs.export(tmp_path / "logits.pte", logits)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1 and "forward: output: got Float, expected tokens (Long)" in done.stderr
    path = programs.export(tmp_path / "tokens.pte", programs.successor, parameters=False, sampling_head=False)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1 and "forward: output: got Long, expected logits (Float, Half or BFloat16)" in done.stderr
