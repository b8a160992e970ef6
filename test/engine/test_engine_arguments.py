"""The command line of mlx_llm_runner. If it is invalid, the exit status is 2 and stderr has the reason."""

import llm_programs as programs
import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing argument MODEL.pte"),
        (["M"], "missing option --prompt-ids"),
        (["M", "more.pte", "--prompt-ids", "1"], "unexpected argument 'more.pte': the model is M"),
        (["M", "--prompt", "1"], "--prompt: unknown option"),
        (["M", "--prompt-ids"], "--prompt-ids: missing value"),
        (["M", "--prompt-ids", ""], "--prompt-ids: got no token ids, expected a list such as 1,2,3"),
        (["M", "--prompt-ids", "1,x"], "--prompt-ids: got 'x', expected an integer of at least 0"),
        (["M", "--prompt-ids", "-1"], "--prompt-ids: got '-1', expected an integer of at least 0"),
        (["M", "--prompt-ids", "1.5"], "--prompt-ids: got '1.5', expected an integer"),
        (["M", "--prompt-ids", "@no/such"], "--prompt-ids: cannot read the file no/such"),
        (["M", "--max-new-tokens", "0"], "--max-new-tokens: got '0', expected an integer of at least 1"),
        (["M", "--max-new-tokens=1e3"], "--max-new-tokens: got '1e3', expected an integer"),
        (["M", "--temperature", "-1"], "--temperature: got '-1', expected a number of at least 0"),
        (["M", "--temperature", "nan"], "--temperature: got 'nan', expected a number"),
        (["M", "--temperature", "1,5"], "--temperature: got '1,5', expected a number"),
        (["M", "--top-k", "-1"], "--top-k: got '-1', expected an integer of at least 0"),
        (["M", "--top-p", "1.1"], "--top-p: got '1.1', expected a number from 0 to 1"),
        (["M", "--min-p", "2"], "--min-p: got '2', expected a number from 0 to 1"),
        (["M", "--seed", "9223372036854775808"], "--seed: got '9223372036854775808', expected a 64-bit integer"),
        (["M", "--stop-ids", "1,,b"], "--stop-ids: got 'b', expected an integer"),
        (["M", "--ids=1"], "--ids: this option takes no value"),
        (["M", "--repeat", "0"], "--repeat: got '0', expected an integer of at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_command_line_prints_usage(run, arguments, message):
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
        (["--prompt-ids", "1", "--device", "tpu"], "device: got 'tpu', expected cpu or gpu"),
        (
            ["--prompt-ids", ",".join(["1"] * 1001)],
            "prompt: got 1001 tokens, expected at most 1000 (the context of the program)",
        ),
    ],
    ids=["vocabulary", "stop id", "device", "long prompt"],
)
def test_invalid_request_is_an_error(run, successor, arguments, message):
    done = run(successor, *arguments)
    assert done.code == 2
    assert done.stdout == ""
    assert message in done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "name"), [("--seed", "1", "seed"), ("--top-k", "40", "top_k"), ("--min-p", "0.1", "min_p")]
)
def test_parameter_that_was_not_exported_is_an_error(run, program, flag, value, name):
    bare = program("bare", programs.successor, optional=())
    done = run(bare, "--prompt-ids", "1", flag, value)
    assert done.code == 2
    assert f"{name}: the program was exported without this parameter" in done.stderr
    assert run(bare, "--prompt-ids", "1", "--ids", "--max-new-tokens", "2").ids == [2, 3]


def test_text_needs_token_bytes(run, program):
    path = program("no_table", programs.successor, vocabulary=None)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 2
    assert "the program has no token bytes, use --ids" in done.stderr
    assert run(path, "--prompt-ids", "1", "--ids", "--max-new-tokens", "1").ids == [2]


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_missing_or_empty_file_is_an_error(run, tmp_path, content):
    path = tmp_path / "model.pte"
    if content is not None:
        path.write_bytes(content)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 2
    assert "model.pte: the file is unreadable or empty" in done.stderr


def test_folder_is_an_error(run, tmp_path):
    done = run(tmp_path, "--prompt-ids", "1")
    assert done.code == 2
    assert f"{tmp_path}: the file is unreadable or empty" in done.stderr


def test_prompt_from_file_and_stdin(run, successor, tmp_path):
    file = tmp_path / "ids"
    file.write_text("5, 6\n7\n")
    options = ["--ids", "--max-new-tokens", "1"]
    assert run(successor, "--prompt-ids", f"@{file}", *options).ids == [8]
    assert run(successor, "--prompt-ids", "-", *options, stdin="1 2 3\n").ids == [4]


def test_help_of_sampling_parameters_matches_python(run):
    from executorch_mlx.llm.sampling_parameters import PARAMETERS

    lines = run("--help").stdout.splitlines()
    for name, spec in PARAMETERS.items():
        flag = "--allow-ids" if name == "allowed_tokens" else f"--{name.replace('_', '-')}"
        (line,) = (line for line in lines if line.split()[:1] == [flag])
        assert line.split(maxsplit=2)[2].startswith(spec.help)


def test_help_goes_to_stdout(run):
    done = run("--help")
    assert done.code == 0
    assert done.stdout.startswith("usage: mlx_llm_runner MODEL.pte")
    assert done.stderr == ""
