"""mlx_llm_runner --memory-limit."""

import re

import pytest


def test_limit_that_admits_the_model_changes_nothing(run, successor):
    plain = run(successor, "--prompt-ids", "1,2", "--ids", "--max-new-tokens", "5")
    limited = run(successor, "--prompt-ids", "1,2", "--ids", "--max-new-tokens", "5", "--memory-limit", "1GiB")
    assert limited.ids == plain.ids == [3, 4, 5, 6, 7]


def test_model_beyond_the_limit_is_an_error(run, chat_program):
    done = run(chat_program, "--prompt-ids", "1", "--memory-limit", "100kB")
    assert done.code == 1 and done.stdout == ""
    expected = r"mlx_llm_runner: .*: cannot load the method sample: memory limit: constants and buffers: asked "
    expected += r"for \d+ bytes, \d+ bytes are active, the limit is 100000 bytes"
    assert re.match(expected, done.stderr.splitlines()[-1])


def test_step_beyond_the_limit_is_an_error(run, chat_program):
    """The prompt is divided into chunks of one token, and the first one does not fit."""
    done = run(chat_program, "--prompt-ids", "1", "--memory-limit", "100kB")
    needed = int(re.search(r"asked for (\d+) bytes", done.stderr)[1])
    done = run(chat_program, "--prompt-ids", "1,2,3", "--memory-limit", str(needed + 200))
    assert done.code == 1
    assert done.finish == "error"
    assert re.search(rf"sample: 1 tokens at position 0: .*the limit is {needed + 200} bytes", done.stderr)


@pytest.mark.parametrize("size", ["", "0", "-1", "much", "1.5", "2 GiBs", "GiB", "1e9", "0.1B", "9999999TiB", "nan"])
def test_invalid_size_is_a_usage_error(run, size):
    done = run("M", f"--memory-limit={size}")
    assert done.code == 2
    message = f"--memory-limit: got '{size}', expected a size such as 2GiB, 512MiB or 1000000 (bytes)"
    assert message in done.stderr.splitlines()[0]


@pytest.mark.parametrize("size", ["512MiB", "1.5 gb", "900m", "100000000", "100000000B", "0.5GiB"])
def test_sizes_are_those_of_the_python_command(run, successor, size):
    assert run(successor, "--prompt-ids", "1", "--ids", "--max-new-tokens", "1", "--memory-limit", size).ids == [2]
