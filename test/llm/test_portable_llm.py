"""Portable programs: their single method `forward` draws what several methods draw.

test_engine_generate.py and test_serve_api.py run such a program with the runner and with the server.
"""

from pathlib import Path

import pytest
import small_llm
import torch
from executorch_mlx import Runtime
from executorch_mlx.cli.main import main
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from loaded_method import LoadedMethod

HEAD = HeadConfig(penalties=32, logit_bias=4, allowed_tokens=True, logprobs=2)
PROMPT = [5, 17, 200, 3, 77] * 7  # three chunks
SAMPLED = dict(temperature=0.9, seed=11, top_k=20, repetition_penalty=1.2)
LENGTH = 24


@pytest.fixture(scope="module")
def llm(portable_program) -> LLM:
    return LLM.load(portable_program)


@pytest.fixture(scope="module")
def several_methods(tmp_path_factory) -> LLM:
    """The same model with several methods."""
    path = small_llm.shared(tmp_path_factory, "portable-default", batch=2, speculation=True, head=HEAD)
    return LLM.load(path)


def tokens(llm, prompt=PROMPT, **parameters):
    return llm.generate(prompt, max_new_tokens=LENGTH, ignore_eos=True, **parameters).result().tokens


def methods_of(path: Path) -> list[str]:
    """Return the methods that are not constant."""
    program = Runtime.get().load_program(path)
    return [name for name in program.method_names if program.metadata(name).num_inputs()]


def test_one_method(portable_program):
    assert methods_of(portable_program) == ["forward"]


@pytest.mark.parametrize("parameters", [{}, SAMPLED, dict(temperature=1.0, seed=3)], ids=["greedy", "all", "seed"])
def test_tokens_equal_those_of_several_methods(llm, several_methods, parameters):
    assert tokens(llm, **parameters) == tokens(several_methods, **parameters)


def test_chunks_and_what_the_cache_held_do_not_matter(portable_program, llm):
    expected = tokens(llm, **SAMPLED)
    fresh = LLM.load(portable_program, chunk=3)
    assert tokens(fresh, **SAMPLED) == expected
    tokens(fresh, PROMPT[::-1])
    assert tokens(fresh, **SAMPLED) == expected
    # The engine reuses the rows of a prefix, and writes the rest of the prompt over what followed it.
    tokens(fresh, PROMPT[:20] + [9, 8, 7])
    assert tokens(fresh, **SAMPLED) == expected


def test_requests_wait_for_each_other(llm):
    alone = [tokens(llm, prompt, **SAMPLED) for prompt in (PROMPT, PROMPT[:3])]
    results = llm.generate_batch([PROMPT, PROMPT[:3]], max_new_tokens=LENGTH, ignore_eos=True, **SAMPLED)
    assert [result.tokens for result in results] == alone


def test_log_probabilities(llm, several_methods):
    ours, expected = (list(x.generate(PROMPT, max_new_tokens=4, logprobs=2)) for x in (llm, several_methods))
    assert [a.logprob for a in ours] == pytest.approx([b.logprob for b in expected], abs=1e-5)
    assert [[t for t, _ in a.top_logprobs] for a in ours] == [[t for t, _ in b.top_logprobs] for b in expected]


def test_scores(llm, several_methods):
    """Without `verify`, a call scores one token."""
    (ours,), (expected,) = (x.score(PROMPT, [[7, 300, 12]]) for x in (llm, several_methods))
    assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_positions_beyond_the_capacity_are_refused(tmp_path):
    """A write of a single position beyond the end would do nothing, without an error."""
    options = dict(outputs="logits", tokenizer=None, max_context_len=20)
    path = small_llm.export(tmp_path / "logits.pte", portable=True, **options)
    assert methods_of(path) == ["forward"]
    method = LoadedMethod(path)
    method.execute([torch.tensor([[1, 2]]), torch.tensor([18])])
    for length, position in ((1, 20), (2, 19), (1, 1000), (1, -1), (2, -1)):
        with pytest.raises(RuntimeError):
            method.execute([torch.ones(1, length, dtype=torch.int64), torch.tensor([position])])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(batch=2), "batch: got 2 with portable, expected 1: a portable program answers one request at a time"),
        (dict(outputs="both"), "outputs: got both with portable, expected tokens or logits: a portable program has"),
        (dict(allow_extensions=True), "allow_extensions: got True with portable, expected False"),
    ],
    ids=["batch", "outputs", "allow_extensions"],
)
def test_options_that_a_portable_program_cannot_have(options, message):
    with pytest.raises(ValueError, match=f"export_llm: {message}"):
        export_llm(small_llm.DEMO, portable=True, **options)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "demo.pte"
    assert main(["export", str(small_llm.DEMO), "-o", str(path), "--portable", "--batch", "4"]) == 1
    assert "batch: got 4 with portable, expected 1" in capsys.readouterr().err and not path.exists()
    assert main(["export", str(small_llm.DEMO), "-o", str(path), "--portable", "--no-verify"]) == 0
    assert "methods      forward\n" in capsys.readouterr().out
    assert LLM.load(path).generate("Return the", max_new_tokens=4).result().tokens
