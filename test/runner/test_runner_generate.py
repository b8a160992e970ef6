"""What ends an answer, which values reach the program, and what is reported."""

import re
import signal
import subprocess

import llm_programs as programs
import pytest
from llm_cli import find_program


def test_max_new_tokens(run, successor):
    done = run(successor, "--prompt-ids", "10", "--ids", "--max-new-tokens", "5")
    assert done.ids == [11, 12, 13, 14, 15]
    assert done.finish == "max new tokens"


def test_stop_ids_are_not_part_of_the_answer(run, successor):
    done = run(successor, "--prompt-ids", "10", "--ids", "--stop-ids", "20,13")
    assert done.ids == [11, 12]
    assert done.finish == "stop id"


def test_stop_at_the_first_token(run, successor):
    done = run(successor, "--prompt-ids", "10", "--ids", "--stop-ids", "11")
    assert done.ids == []
    assert "decode: 0 tokens" in done.stderr


@pytest.mark.parametrize("eos", [[12], [99, 12]], ids=["one", "two"])
def test_eos_ids_of_the_program(run, program, eos):
    path = program(f"eos_{len(eos)}", programs.successor, get_eos_ids=eos)
    arguments = [path, "--prompt-ids", "10", "--ids", "--max-new-tokens", "4"]
    assert run(*arguments).ids == [11]
    assert run(*arguments, "--ignore-eos").ids == [11, 12, 13, 14]
    assert run(*arguments, "--ignore-eos", "--stop-ids", "13").ids == [11, 12]


def test_context_full(run, program):
    """The last of 16 positions is written, and one more token drawn after it."""
    path = program("short", programs.successor, max_context_len=16)
    done = run(path, "--prompt-ids", "1,2,3", "--ids", "--max-new-tokens", "100")
    assert done.ids == list(range(4, 18))
    assert done.finish == "context full"


def test_a_prompt_that_fills_the_context(run, program):
    path = program("short", programs.successor, max_context_len=16)
    done = run(path, "--prompt-ids", ",".join(map(str, range(16))), "--ids")
    assert done.ids == [16]
    assert done.finish == "context full"


def _summed(context: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(context)) % 256


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 21])
def test_long_prompts_go_in_pieces(run, program, length):
    """Up to max_seq_len tokens a call, each at its position."""
    path = program(
        "summed",
        programs.summed,
        state=programs.summed_state(32),
        max_seq_len=8,
        max_context_len=32,
    )
    context = [(7 * i + 3) % 256 for i in range(length)]
    done = run(
        path, "--prompt-ids", ",".join(map(str, context)), "--ids", "--max-new-tokens", "4"
    )
    expected = []
    for _ in range(4):
        expected.append(_summed(context))
        context.append(expected[-1])
    assert done.ids == expected


@pytest.mark.parametrize("seed", [0, 40, 255, -3, 2**63 - 2, -(2**63)])
def test_seed_advances_by_one(run, program, seed):
    """From the prefill's token on, and round the end of int64."""
    path = program("seeded", programs.seeded)
    done = run(
        path, "--prompt-ids", "1", "--ids", "--max-new-tokens", "5", f"--seed={seed}"
    )
    assert done.ids == [(seed + step) % 256 for step in range(5)]
    assert f"seed: {seed}\n" in done.stderr


def test_pieces_of_the_prompt_take_no_seeds(run, program):
    path = program("seeded", programs.seeded)
    done = run(path, "--prompt-ids", "1 " * 12, "--ids", "--max-new-tokens", "3", "--seed", "7")
    assert done.ids == [7, 8, 9]


def test_random_seed_is_told(run, program):
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
    """Those left out arrive as off: temperature 0, top_p 1, top_k 0, min_p 0."""
    path = program("parameters", programs.parameters, tokens=None, vocab_size=20000)
    done = run(path, "--prompt-ids", "1", "--ids", "--max-new-tokens", "1", *options)
    assert done.ids == [token]


def test_timings(run, successor):
    done = run(successor, "--prompt-ids", "1,2,3", "--ids", "--max-new-tokens", "10")
    number = r"\d+\.\d+"
    for line in (
        rf"load: {number} s",
        rf"prompt: 3 tokens in {number} s, {number} tokens/s",
        rf"time to first token: {number} s",
        rf"decode: 9 tokens in {number} s, {number} tokens/s",
        "finish: max new tokens",
    ):
        assert re.search(f"^{line}$", done.stderr, re.MULTILINE), (line, done.stderr)


def test_repeat_starts_from_an_empty_context(run, program):
    path = program(
        "summed",
        programs.summed,
        state=programs.summed_state(32),
        max_seq_len=8,
        max_context_len=32,
    )
    done = run(path, "--prompt-ids", "9,8", "--ids", "--max-new-tokens", "3", "--repeat", "3")
    assert len(done.ids) == 9
    assert done.ids[:3] == done.ids[3:6] == done.ids[6:]
    assert done.stderr.count("finish:") == 3


def test_interrupt_ends_the_answer(program):
    """Ctrl-C keeps what was printed and reports the timings."""
    path = program("endless", programs.successor, max_context_len=10**12)
    command = [find_program("mlx_llm_runner"), path, "--prompt-ids", "1", "--ids"]
    process = subprocess.Popen(
        [*map(str, command), "--max-new-tokens", str(10**12)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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
