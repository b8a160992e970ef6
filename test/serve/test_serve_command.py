"""The command executorch-mlx serve."""

import argparse
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from executorch_mlx.cli import serve
from executorch_mlx.cli.main import main
from executorch_mlx.serve.middleware import access_log
from executorch_mlx.serve.server import _logs_on_stderr

COMMAND = [sys.executable, "-m", "executorch_mlx.cli.main", "serve"]


@contextmanager
def started(folder: Path, *arguments) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run the command with the model name `mine`. Yields its address and its process. The log is in `folder`."""
    with open(folder / "log", "wb") as log:
        command = [*COMMAND, *map(str, arguments), "--port", "0", "--name", "mine"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"mine: chat page at (http://127.0.0.1:\d+)/, OpenAI API at \1/v1\n", line)
        assert found, (line, (folder / "log").read_text())
        yield found[1], process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize(
    "grace, signals, ends",
    [
        (0, [signal.SIGINT], False),
        (60, [signal.SIGINT], True),
        (60, [signal.SIGTERM], True),
        (60, [signal.SIGINT, signal.SIGINT], False),
    ],
)
def test_after_a_signal_running_answers_have_the_grace_period_to_finish(chat_program, tmp_path, grace, signals, ends):
    """`ends`: the answers come to their end. Otherwise, there are so many that they run when the signals arrive."""
    prompts = [[5]] * (1 if ends else 50)
    body = {"model": "mine", "prompt": prompts, "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with started(tmp_path, chat_program, "--grace", grace) as (url, process):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            assert json.loads(next(events))["model"] == "mine"
            for index, sent in enumerate(signals):
                while index and "Shutting down" not in (tmp_path / "log").read_text():  # the first one has arrived
                    assert process.poll() is None
                    time.sleep(0.01)
                process.send_signal(sent)
            *_, last = events
        assert process.wait(timeout=60) == 0
    assert last == "[DONE]" if ends else json.loads(last)["error"]["message"] == "the server is shutting down"
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    assert [(line["path"], line["status"]) for line in log] == [("/v1/completions", 200)]


def test_third_interrupt_closes_connections(chat_program, tmp_path):
    """Here, of a client whose request does not arrive. No exception is logged."""
    with started(tmp_path, chat_program) as (url, process):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
            assert httpx.get(f"{url}/health").status_code == 200  # the server has read the other request, too
            for _ in range(3):
                process.send_signal(signal.SIGINT)
                time.sleep(0.3)
            assert process.wait(timeout=60) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_draft_model_changes_no_answer(logprob_program, chat_program, tmp_path):
    """The requests run one after the other. The second asks for three choices, which run at the same time."""
    prompt = {"model": "mine", "prompt": "Return the", "max_tokens": 40, "ignore_eos": True}
    chat = {"model": "mine", "messages": [{"role": "user", "content": "Return"}], "max_tokens": 24, "seed": 5}
    requests = [
        ("completions", prompt | {"temperature": 0}),
        ("completions", prompt | {"seed": 3, "n": 3, "logprobs": 2}),
        ("completions", prompt | {"seed": 4, "top_p": 0.9, "stop": ["the"], "ignore_eos": False}),
        ("chat/completions", chat),
    ]
    answers = []
    for options in ([], ["--draft-model", chat_program]):
        with started(tmp_path, logprob_program, *options) as (url, _):
            answers.append([httpx.post(f"{url}/v1/{path}", json=body, timeout=60).json() for path, body in requests])
            metrics = httpx.get(f"{url}/metrics").text
    plain, drafted = ([answer["choices"] for answer in of_server] for of_server in answers)
    assert drafted == plain and all(choice["finish_reason"] for choices in plain for choice in choices)
    counter = r'^executorch_mlx_engine_(\w+)_tokens_total\{model="mine"\} (\S+)$'
    counts = dict(re.findall(counter, metrics, re.MULTILINE))
    # There is at least one draft, because its time is not known before. Measured times decide about later drafts. The
    # draft model has the weights of the model, so the engine accepts draft tokens.
    assert 1 <= float(counts["accepted"]) <= float(counts["drafted"])


def test_draft_model_must_fit(chat_program, tmp_path, capfd):
    assert main(["serve", str(chat_program), "--draft-model", str(chat_program), "--port", "0"]) == 1
    assert "was exported without the method verify" in capfd.readouterr().err
    assert main(["serve", str(chat_program), "--draft-model", str(tmp_path / "none.pte"), "--port", "0"]) == 1
    assert "none.pte" in capfd.readouterr().err


def test_missing_model_is_an_error(tmp_path, capfd):
    assert main(["serve", str(tmp_path / "none.pte")]) == 1
    assert "No such file" in capfd.readouterr().err


def test_address_in_use_is_an_error(chat_program, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(chat_program), "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capfd.readouterr().err
    assert access_log.propagate and not access_log.handlers  # the log of later servers in this process


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--port", "70000"], "argument --port: got '70000', expected 0 to 65535"),
        (["--queue", "0"], "argument --queue: got '0', expected at least 1"),
        (["--grace", "-1"], "argument --grace: got '-1', expected at least 0"),
        (
            ["--allowed-origins", "https://a.example, b.example"],
            "--allowed-origins: got 'b.example', expected an origin",
        ),
        (["--allowed-origins", "https://a.example/chat"], "got 'https://a.example/chat', expected an origin"),
    ],
)
def test_numbers_and_origins_in_the_wrong_form_are_usage_errors(arguments, message, capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "model.pte", *arguments])
    assert message in capfd.readouterr().err


def test_origins_are_as_browsers_send_them():
    parser = argparse.ArgumentParser()
    serve.add_to(parser.add_subparsers())
    options = ["--allowed-origins", "https://A.example/, http://b.example:80,null,*"]
    parsed = parser.parse_args(["serve", "a.pte", *options])
    assert parsed.allowed_origins == ("https://a.example", "http://b.example:80", "null", "*")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--host", "0.0.0.0"], "other machines can reach 0.0.0.0: set --api-key, or --no-auth to serve without one"),
        (["--name", "a", "--name", "b"], "--name: got 2 names, expected one for each of 1 models"),
        (["--tool-format", "xml"], "--tool-format: got 'xml', expected one of hermes"),
        (["--model-memory", "1KiB"], "bytes, the budget is 1024"),
    ],
)
def test_unsafe_and_wrong_options_are_errors(chat_program, arguments, message, capfd, monkeypatch):
    monkeypatch.delenv("EXECUTORCH_MLX_API_KEY", raising=False)
    assert main(["serve", str(chat_program), "--port", "0", *arguments]) == 1
    assert message in capfd.readouterr().err


def test_each_record_of_the_logs_is_one_line(capsys):
    """A message, or the text of an error, may have line feeds and escape sequences of terminals."""
    with _logs_on_stderr():
        for name in ("executorch_mlx.serve", "uvicorn.error"):
            try:
                raise ValueError("a\n{}\x1b[2J\u2028")
            except ValueError as error:
                logging.getLogger(name).error("failed: %s", "b\r\nc", exc_info=error)
        access_log.info('{"a": 1}')
    first, second, third = capsys.readouterr().err.splitlines()
    for line in (first, second):
        assert line.startswith("failed: b\\r\\nc\\nTraceback") and line.endswith("ValueError: a\\n{}\\x1b[2J\\u2028")
    assert third == '{"a": 1}'
