"""What the command line refuses, and how: exit code 2 and a line that says what and why."""

import llm_programs as programs
import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model: expected MODEL.pte"),
        (["M"], "--prompt-ids: missing"),
        (["M", "more.pte", "--prompt-ids", "1"], "'more.pte': one model only"),
        (["M", "--prompt", "1"], "--prompt: no such option"),
        (["M", "--prompt-ids"], "--prompt-ids: a value is missing"),
        (["M", "--prompt-ids", ""], "--prompt-ids: no ids"),
        (["M", "--prompt-ids", "1,x"], "--prompt-ids: 'x' is not an integer of at least 0"),
        (["M", "--prompt-ids", "-1"], "--prompt-ids: '-1' is not an integer of at least 0"),
        (["M", "--prompt-ids", "1.5"], "--prompt-ids: '1.5' is not an integer"),
        (["M", "--prompt-ids", "@no/such"], "--prompt-ids: no/such cannot be read"),
        (["M", "--max-new-tokens", "0"], "--max-new-tokens: '0' is not an integer of at least 1"),
        (["M", "--max-new-tokens=1e3"], "--max-new-tokens: '1e3' is not an integer"),
        (["M", "--temperature", "-1"], "--temperature: '-1' is not a number of at least 0"),
        (["M", "--temperature", "nan"], "--temperature: 'nan' is not a number"),
        (["M", "--temperature", "1,5"], "--temperature: '1,5' is not a number"),
        (["M", "--top-k", "-1"], "--top-k: '-1' is not an integer of at least 0"),
        (["M", "--top-p", "1.1"], "--top-p: '1.1' is not a number from 0 to 1"),
        (["M", "--min-p", "2"], "--min-p: '2' is not a number from 0 to 1"),
        (["M", "--seed", "9223372036854775808"], "is not a 64-bit integer"),
        (["M", "--stop-ids", "1,,b"], "--stop-ids: 'b' is not an integer"),
        (["M", "--ids=1"], "--ids: takes no value"),
        (["M", "--repeat", "0"], "--repeat: '0' is not an integer of at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_with_usage(run, arguments, message):
    done = run(*arguments)
    assert done.code == 2
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[0]
    assert "usage: mlx_llm_runner MODEL.pte" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-ids", "1,256"], "prompt: id 256 is outside the vocabulary [0, 256)"),
        (["--prompt-ids", "1", "--stop-ids", "300"], "stop_ids: id 300 is outside the vocabulary"),
        (["--prompt-ids", "1", "--device", "tpu"], "device: 'tpu', expected cpu or gpu"),
        (
            ["--prompt-ids", ",".join(["1"] * 1001)],
            "prompt: 1001 tokens after 0 in the context are more than its 1000 positions",
        ),
    ],
    ids=["vocabulary", "stop id", "device", "long prompt"],
)
def test_refused_for_this_program(run, successor, arguments, message):
    done = run(successor, *arguments)
    assert done.code == 2
    assert done.stdout == ""
    assert message in done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [("--seed", "1", "seed"), ("--top-k", "40", "top_k"), ("--min-p", "0.1", "min_p")],
)
def test_parameters_that_were_not_exported(run, program, flag, value, name):
    bare = program("bare", programs.successor, optional=())
    done = run(bare, "--prompt-ids", "1", flag, value)
    assert done.code == 2
    assert f"{name}: the program was exported without it" in done.stderr
    assert run(bare, "--prompt-ids", "1", "--ids", "--max-new-tokens", "2").ids == [2, 3]


def test_text_needs_the_token_table(run, program):
    path = program("no_table", programs.successor, tokens=None)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 2
    assert "carries no bytes of its tokens, use --ids" in done.stderr
    assert run(path, "--prompt-ids", "1", "--ids", "--max-new-tokens", "1").ids == [2]


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_no_file(run, tmp_path, content):
    path = tmp_path / "model.pte"
    if content is not None:
        path.write_bytes(content)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 2
    assert "model.pte: cannot be read, or is empty" in done.stderr


def test_a_folder_is_no_program(run, tmp_path):
    done = run(tmp_path, "--prompt-ids", "1")
    assert done.code == 2
    assert "cannot be read" in done.stderr


def test_prompt_from_file_and_stdin(run, successor, tmp_path):
    file = tmp_path / "ids"
    file.write_text("5, 6\n7\n")
    options = ["--ids", "--max-new-tokens", "1"]
    assert run(successor, "--prompt-ids", f"@{file}", *options).ids == [8]
    assert run(successor, "--prompt-ids", "-", *options, stdin="1 2 3\n").ids == [4]


def test_help(run):
    done = run("--help")
    assert done.code == 0
    assert done.stdout.startswith("usage: mlx_llm_runner MODEL.pte")
    assert done.stderr == ""
