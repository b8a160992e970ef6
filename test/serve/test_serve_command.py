"""The command executorch-mlx serve."""

import json
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from executorch_mlx.cli.main import main

COMMAND = [sys.executable, "-m", "executorch_mlx.cli.main", "serve"]


@pytest.mark.parametrize("grace, sent", [(0, signal.SIGINT), (60, signal.SIGINT), (60, signal.SIGTERM)])
def test_after_a_signal_running_answers_have_the_grace_period_to_finish(chat_program, tmp_path, grace, sent):
    with open(tmp_path / "log", "wb") as log:
        command = [*COMMAND, chat_program, "--port", "0", "--name", "mine", "--grace", str(grace)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    line = process.stdout.readline()
    found = re.fullmatch(r"mine: chat page at (http://127.0.0.1:\d+)/, OpenAI API at \1/v1\n", line)
    assert found, (line, (tmp_path / "log").read_text())
    url = found[1]
    body = {"model": "mine", "prompt": [5], "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        assert json.loads(next(events))["model"] == "mine"
        process.send_signal(sent)
        *_, last = events
    if grace:
        assert last == "[DONE]"
    else:
        assert json.loads(last)["error"]["message"] == "the server is shutting down"
    assert process.wait(timeout=60) == 0
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    assert [(line["path"], line["status"]) for line in log] == [("/v1/completions", 200)]


def test_missing_model_is_an_error(tmp_path, capfd):
    assert main(["serve", str(tmp_path / "none.pte")]) == 1
    assert "No such file" in capfd.readouterr().err


def test_address_in_use_is_an_error(chat_program, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(chat_program), "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--port", "70000"], "argument --port: got '70000', expected 0 to 65535"),
        (["--queue", "0"], "argument --queue: got '0', expected at least 1"),
        (["--grace", "-1"], "argument --grace: got '-1', expected at least 0"),
    ],
)
def test_numbers_out_of_range_are_usage_errors(arguments, message, capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "model.pte", *arguments])
    assert message in capfd.readouterr().err


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
