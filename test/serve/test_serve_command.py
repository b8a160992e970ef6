"""executorch-mlx serve, as it is typed."""

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


def test_it_serves_until_ctrl_c(chat_program, tmp_path):
    """Which ends a stream on its way too, in so many words."""
    with open(tmp_path / "log", "wb") as log:
        command = [*COMMAND, chat_program, "--port", "0", "--name", "mine"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    line = process.stdout.readline()
    assert line.startswith("mine: chat at http://127.0.0.1:"), (tmp_path / "log").read_text()
    url = re.search(r"http://[^/]+", line)[0]
    asked = {"model": "mine", "prompt": [5], "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as response:
        events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        assert json.loads(next(events))["model"] == "mine"
        process.send_signal(signal.SIGINT)
        *_, last = events
    assert json.loads(last)["error"]["message"] == "the server is shutting down"
    assert process.wait(timeout=60) == 0


def test_no_model_to_serve(tmp_path, capfd):
    assert main(["serve", str(tmp_path / "none.pte")]) == 1
    assert "No such file" in capfd.readouterr().err


def test_an_address_that_cannot_be_had_is_named(chat_program, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(chat_program), "--port", str(port)]) == 1
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--port", "70000"], "argument --port: '70000', expected 0 to 65535"),
        (["--queue", "0"], "argument --queue: '0', expected 1 or more"),
    ],
)
def test_numbers_out_of_range_are_bad_usage(arguments, told, capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "model.pte", *arguments])
    assert told in capfd.readouterr().err
