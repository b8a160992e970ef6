"""Every parameter of a draw, inside the program and on the host: the tokens that Python gets."""

import json

import llm_programs as programs
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# More tokens than the noise of the filters has parts.
VOCABULARY = 3000
PROMPT = [5, 900, 17, 2999, 4]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """`exported(name, **options)`: the program of one random model."""
    from executorch_mlx.llm.export import export_llm

    folder = tmp_path_factory.mktemp("sampling")

    def make(name, **options):
        path = folder / f"{name}.pte"
        if not path.exists():
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                bos_token_id=None, eos_token_id=None, initializer_range=0.3,
            )  # fmt: skip
            export_llm(LlamaForCausalLM(config), chunk=8, **options).save(path)
        return path

    return make


@pytest.fixture(scope="module")
def full(exported):
    from executorch_mlx.llm.parameters import Sampling

    sampling = Sampling(penalties=16, logit_bias=3, allowed_tokens=True)
    return exported("full", outputs="both", sampling=sampling)


@pytest.fixture(scope="module")
def bare(exported):
    """Three rows; a head of few parameters, and logits for the host to honour the others."""
    from executorch_mlx.llm.parameters import Sampling

    return exported("bare", outputs="both", batch=3, sampling=Sampling(top_k=False, min_p=False))


def prompt_flags(*prompts):
    return [flag for ids in prompts for flag in ("--prompt-ids", ",".join(map(str, ids)))]


def flags(settings):
    bias = {"logit_bias": lambda value: ",".join(f"{k}:{v}" for k, v in value.items())}
    return [f"--{k.replace('_', '-')}={bias.get(k, str)(v)}" for k, v in settings.items()]


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
@pytest.mark.parametrize("where", ["full", "bare"])
def test_the_tokens_of_python(run, request, where, settings):
    """A prompt of one call, and one of two pieces, whose history is longer than the program's."""
    from executorch_mlx.llm.llm import LLM

    path = request.getfixturevalue(where)
    llm = LLM.load(path)
    for prompt in (PROMPT, PROMPT * 2):
        generation = llm.generate(prompt, max_new_tokens=20, **settings)
        want = [token.id for token in generation]
        done = run(path, *prompt_flags(prompt), "--ids", "--max-new-tokens", "20", *flags(settings))
        assert done.ids == want


@pytest.mark.parametrize("where", ["full", "bare"])
def test_allowed_tokens(run, request, where):
    allowed = {3, 31, 32, 2999}
    arguments = [*prompt_flags(PROMPT), "--ids", "--max-new-tokens=30", "--temperature=5", "--seed=1"]
    path = request.getfixturevalue(where)
    ids = run(path, *arguments, "--allow-ids", ",".join(map(str, allowed))).ids
    assert len(ids) == 30 and set(ids) == allowed


def test_too_many_biases(run, full):
    done = run(full, *prompt_flags(PROMPT), "--ids", "--logit-bias", "1:1,2:1,3:1,4:1")
    assert done.code == 2 and "logit_bias: 4 tokens, the program takes 3" in done.stderr


# -- batches -----------------------------------------------------------------------

# By length, as Python puts them into rows: the noise is of a row.
PROMPTS = [[1], PROMPT, list(range(20, 33))]


ON_HOST = {"temperature": 1.0, "top_k": 50, "seed": 9}


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 9}, ON_HOST], ids=str)
def test_a_batch(run, bare, full, settings):
    from executorch_mlx.llm.llm import LLM

    python = LLM.load(bare)
    for prompts in (PROMPTS, PROMPTS[1:]):
        want = [result.tokens for result in python.generate_batch(prompts, max_new_tokens=9, **settings)]
        arguments = [*prompt_flags(*prompts), *flags(settings), "--max-new-tokens", "9"]
        done = run(bare, *arguments, "--json")
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        rows = {line["row"]: line for line in lines if "finish" in line}
        assert [rows[row]["tokens"] for row in range(len(prompts))] == want
        assert [rows[row]["prompt_tokens"] for row in range(len(prompts))] == list(map(len, prompts))
    shown = run(bare, *arguments, "--ids").stdout.splitlines()
    assert shown == [f"[{i}] {' '.join(map(str, ids))}" for i, ids in enumerate(want)]
    if not settings:
        # What stands before a row does not show.
        alone = run(full, *prompt_flags(prompts[0]), "--ids", "--max-new-tokens", "9")
        assert alone.ids == want[0]


def test_more_prompts_than_rows(run, full):
    done = run(full, *prompt_flags([1], [2]), "--ids")
    assert done.code == 2 and "prompts: 2, the program has 1 row" in done.stderr


# -- programs without a head ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_logits_of_every_dtype(run, tmp_path, dtype):
    """The most likely token follows the last; its neighbour has half a chance against it."""

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


def test_a_head_that_returns_logits(run, tmp_path):
    def logits(self, tokens, input_pos, **_):
        return torch.zeros(1, 1, 256)

    path = programs.export(tmp_path / "logits.pte", logits)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1 and "forward does not return a token, Long [1]" in done.stderr
    path = programs.export(tmp_path / "tokens.pte", programs.successor, parameters=False, sampling_head=False)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1 and "forward returns Long, expected logits" in done.stderr
