"""Generation: the end of an answer, the inputs of the program, and the report on stderr."""

import re
import signal
import subprocess

import llm_programs as programs
import pytest
from cpp_programs import find_program
from executorch_mlx.llm import LLM


def test_finish_reasons_are_listed(run):
    (names,) = re.findall(r"^finish reasons: (.*)$", run("--help").stdout, re.MULTILINE)
    assert names == "stop length context cancelled error"


def test_answer_ends_after_max_new_tokens(run, successor):
    done = run(successor, "--prompt-ids", "10", "--ids", "--max-new-tokens", "5")
    assert done.ids == [11, 12, 13, 14, 15]
    assert done.finish == "length"


def test_stop_id_is_not_part_of_the_answer(run, successor):
    done = run(successor, "--prompt-ids", "10", "--ids", "--stop-ids", "20,13")
    assert done.ids == [11, 12]
    assert done.finish == "stop"


def test_stop_id_may_be_the_first_token(run, successor):
    done = run(successor, "--prompt-ids", "10", "--ids", "--stop-ids", "11")
    assert done.ids == []
    assert done.finish == "stop"
    assert "decode: 0 tokens" in done.stderr


@pytest.mark.parametrize("eos", [[12], [99, 12]], ids=["one", "two"])
def test_eos_ids_of_the_program_end_the_answer(run, program, eos):
    path = program(f"eos_{len(eos)}", programs.successor, get_eos_ids=eos)
    arguments = [path, "--prompt-ids", "10", "--ids", "--max-new-tokens", "4"]
    assert run(*arguments).ids == [11]
    assert run(*arguments, "--ignore-eos").ids == [11, 12, 13, 14]
    assert run(*arguments, "--ignore-eos", "--stop-ids", "13").ids == [11, 12]


def test_minimum_needs_masks_if_there_are_stop_ids(run, program):
    path = program("eos_1", programs.successor, get_eos_ids=[12])
    arguments = [path, "--prompt-ids", "10", "--ids", "--max-new-tokens", "4"]
    done = run(*arguments, "--min-new-tokens=1")
    assert done.code == 2 and "min_new_tokens: the program was exported without allowed_tokens" in done.stderr
    assert run(*arguments, "--min-new-tokens=4", "--ignore-eos").ids == [11, 12, 13, 14]
    done = run(*arguments, "--min-new-tokens=5", "--ignore-eos")
    assert done.code == 2 and "min_new_tokens: got 5, expected at most max_new_tokens, which is 4" in done.stderr


def test_full_context_ends_the_answer(run, program):
    """All 16 positions are filled, and one more token is drawn after them."""
    path = program("short", programs.successor, max_context_len=16)
    done = run(path, "--prompt-ids", "1,2,3", "--ids", "--max-new-tokens", "100")
    assert done.ids == list(range(4, 18))
    assert done.finish == "context"


def test_prompt_may_fill_the_context(run, program):
    path = program("short", programs.successor, max_context_len=16)
    done = run(path, "--prompt-ids", ",".join(map(str, range(16))), "--ids")
    assert done.ids == [16]
    assert done.finish == "context"


@pytest.fixture
def summed(program):
    """A program whose next token depends on all tokens of the context. `_next_token` computes the same token."""
    return program("summed", programs.summed, state=programs.summed_state(32), max_seq_len=8, max_context_len=32)


def _next_token(context: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(context)) % 256


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 21])
def test_long_prompt_is_processed_in_chunks(run, summed, length):
    """A chunk has at most max_seq_len tokens."""
    context = [(7 * i + 3) % 256 for i in range(length)]
    done = run(summed, "--prompt-ids", ",".join(map(str, context)), "--ids", "--max-new-tokens", "4")
    expected = []
    for _ in range(4):
        expected.append(_next_token(context))
        context.append(expected[-1])
    assert done.ids == expected


@pytest.mark.parametrize("seed", [0, 40, 255, -3, 2**63 - 2, -(2**63)])
def test_seed_advances_by_one(run, program, seed):
    """Step i draws with seed + i, which wraps around at the end of int64."""
    path = program("seeded", programs.seeded)
    done = run(path, "--prompt-ids", "1", "--ids", "--max-new-tokens", "5", f"--seed={seed}")
    assert done.ids == [(seed + step) % 256 for step in range(5)]
    assert f"seed: {seed}\n" in done.stderr


def test_chunks_of_the_prompt_do_not_advance_the_seed(run, program):
    path = program("seeded", programs.seeded)
    done = run(path, "--prompt-ids", "1 " * 12, "--ids", "--max-new-tokens", "3", "--seed", "7")
    assert done.ids == [7, 8, 9]


def test_random_seed_is_printed(run, program):
    path = program("seeded", programs.seeded)
    seeds = set()
    for _ in range(3):
        done = run(path, "--prompt-ids", "1", "--ids", "--max-new-tokens", "1")
        seed = int(re.search(r"^seed: (\d+)$", done.stderr, re.MULTILINE)[1])
        assert done.ids == [seed % 256]
        seeds.add(seed)
    assert len(seeds) == 3


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ([], 1000),
        (["--temperature", "0.7"], 8000),
        (["--top-p", "0.9"], 900),
        (["--min-p", "0.2"], 1020),
        (["--top-k", "5"], 1005),
        (["--temperature=0.4", "--top-p=0.3", "--min-p=0.6", "--top-k=7"], 4367),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_parameters_reach_the_program(run, program, options, token):
    """The default values are off: temperature 0, top_p 1, top_k 0, min_p 0."""
    path = program("parameters", programs.digits_of_parameters, vocabulary=None, vocab_size=20000)
    done = run(path, "--prompt-ids", "1", "--ids", "--max-new-tokens", "1", *options)
    assert done.ids == [token]


def test_timings_are_printed(run, successor):
    done = run(successor, "--prompt-ids", "1,2,3", "--ids", "--max-new-tokens", "10")
    number = r"\d+\.\d+"
    for line in (
        rf"load: {number} s",
        rf"prompt: 3 tokens in {number} s, {number} tokens/s",
        rf"time to first token: {number} s",
        rf"decode: 9 tokens in {number} s, {number} tokens/s",
        "finish: length",
    ):
        assert re.search(f"^{line}$", done.stderr, re.MULTILINE), (line, done.stderr)


def test_repeat_starts_from_an_empty_context(run, summed):
    done = run(summed, "--prompt-ids", "9,8", "--ids", "--max-new-tokens", "3", "--repeat", "3")
    assert len(done.ids) == 9
    assert done.ids[:3] == done.ids[3:6] == done.ids[6:]
    assert done.stderr.count("finish:") == 3


def test_interrupt_ends_the_answer(program):
    """Ctrl-C keeps the tokens printed so far and prints the timings."""
    path = program("endless", programs.successor, max_context_len=10**12)
    command = [find_program("mlx_llm_runner"), path, "--prompt-ids", "1", "--ids"]
    process = subprocess.Popen(
        [*map(str, command), "--max-new-tokens", str(10**12)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        head = [process.stdout.readline() for _ in range(100)]
        process.send_signal(signal.SIGINT)
        tail, stderr = process.stdout.read(), process.stderr.read()
        process.wait(timeout=60)
    finally:
        process.kill()
    ids = [int(line) for line in [*head, *tail.splitlines()]]
    assert ids == [i % 256 for i in range(2, 2 + len(ids))]
    assert process.returncode == 130
    assert "finish: cancelled" in stderr
    assert f"decode: {len(ids) - 1} tokens" in stderr


def test_a_portable_program(run, portable_program):
    arguments = [portable_program, "--prompt-ids", "5,17,200", "--max-new-tokens", "12", "--ignore-eos", "--ids"]
    sampled = ["--temperature", "0.9", "--seed", "3", "--repetition-penalty", "1.2"]
    llm = LLM.load(portable_program)
    for options, parameters in ([], {}), (sampled, dict(temperature=0.9, seed=3, repetition_penalty=1.2)):
        answer = llm.generate([5, 17, 200], max_new_tokens=12, ignore_eos=True, **parameters).result()
        assert run(*arguments, *options).ids == answer.tokens
