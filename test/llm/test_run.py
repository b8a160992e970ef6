"""The command `executorch-mlx run`. Tests with signals, pipes and terminals use a process of their own."""

import argparse
import importlib.metadata
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import small_llm
from executorch.devtools import Inspector
from executorch_mlx import memory
from executorch_mlx.cli.errors import CommandError
from executorch_mlx.cli.main import console, main
from executorch_mlx.cli.run import add_to
from executorch_mlx.cli.session import Session
from executorch_mlx.llm import LLM

COMMAND = [sys.executable, "-m", "executorch_mlx.cli.main"]
PROMPT = "Return the value"


def run(*arguments, stdin: str = "") -> subprocess.CompletedProcess:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


@pytest.fixture
def run_in_process(capfd, monkeypatch):
    """A function that runs the command in this process, which has imported torch already. It is faster than `run`."""

    def run(*arguments, stdin: str = ""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([str(argument) for argument in arguments])
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def llm(chat_program) -> LLM:
    return LLM.load(chat_program)


def test_help_does_not_import_torch():
    check = "import sys; from executorch_mlx.cli.main import main\n"
    check += "try: main(['run', '--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "--prompt TEXT" in done.stdout and done.stdout.endswith("False\n")


def test_prompt_is_a_message_if_there_is_a_chat_template(run_in_process, chat_program, llm):
    flags = ("--prompt", PROMPT, "--max-new-tokens", 8)
    message = llm.chat([{"role": "user", "content": PROMPT}], max_new_tokens=8).result().text
    text = llm.generate(PROMPT, max_new_tokens=8).result().text
    assert message != text
    for choice, expected in (((), message), (("--chat",), message), (("--no-chat",), text)):
        assert run_in_process("run", chat_program, *flags, *choice).stdout == expected + "\n"
    without_template = ("--tokenizer", small_llm.DEMO)
    assert run_in_process("run", chat_program, *flags, *without_template).stdout == text + "\n"


def test_text_goes_to_stdout_and_metrics_to_stderr(run_in_process, chat_program, llm):
    settings = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 7, "max_new_tokens": 20}
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = run_in_process("run", chat_program, "--no-chat", "--prompt", PROMPT, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout == llm.generate(PROMPT, **settings).result().text + "\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("[length; prompt: ") and "answer: 20 tokens" in line and line.endswith("seed 7]")


def test_json_output(run_in_process, chat_program, llm):
    whole = llm.generate(PROMPT, max_new_tokens=20).result()
    stop = whole.text[9:14]
    flags = ("--json", "--stop", "absent", "--stop", stop)
    done = run_in_process("run", chat_program, "--no-chat", "--prompt", "-", *flags, stdin=PROMPT)
    answer = json.loads(done.stdout)
    assert answer["text"] == whole.text[: whole.text.index(stop)] and answer["finish"] == "stop"
    assert answer["tokens"] == whole.tokens[: len(answer["tokens"])]
    assert answer["metrics"]["generated_tokens"] == len(answer["tokens"])
    assert done.stderr == ""


def test_chat_with_one_message(run_in_process, chat_program, llm):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    flags = ("--system", "Be brief.", "--prompt", PROMPT, "--max-new-tokens", 8)
    expected = llm.chat(messages, max_new_tokens=8).result().text
    assert expected and run_in_process("run", chat_program, *flags).stdout == expected + "\n"


def test_chat_over_a_pipe(chat_program, llm):
    """Two turns, an unknown command, a new chat, and /exit before the last line."""
    lines = ["Return", "", "More", "/clear", "/nonsense", "Return", "/exit", "Never"]
    done = run("run", chat_program, "--json", "--max-new-tokens", 8, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    first, second, third = map(json.loads, done.stdout.splitlines())
    messages = [{"role": "user", "content": "Return"}]
    assert first["tokens"] == third["tokens"] == llm.chat(messages, max_new_tokens=8).result().tokens
    messages += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "More"}]
    assert second["tokens"] == llm.chat(messages, max_new_tokens=8).result().tokens
    assert [answer["metrics"]["cached_tokens"] for answer in (first, second)] == [0, first["metrics"]["prompt_tokens"]]
    assert done.stderr.startswith("unknown command /nonsense; /clear starts a new chat")


@pytest.mark.parametrize("line", ["/image", "/audio", "/images cat.png"])
def test_a_command_for_a_picture_needs_a_file(run_in_process, chat_program, line):
    done = run_in_process("run", chat_program, stdin=f"{line}\n/exit\n")
    assert done.returncode == 0 and done.stderr.startswith(f"unknown command {line.split()[0]}; ")


def test_unsuitable_draft_model_is_an_error(run_in_process, chat_program):
    done = run_in_process("run", chat_program, "--prompt", PROMPT, "--draft-model", chat_program)
    assert done.returncode == 1 and "draft: " in done.stderr and "without the method verify" in done.stderr


def test_chat_on_a_terminal(chat_program):
    """Ctrl-C does not end the chat; Ctrl-D does."""
    controller, terminal = pty.openpty()
    command = [*COMMAND, "run", chat_program, "--max-new-tokens", "8"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    seen = b""

    def read_until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(controller, 4096)
        seen = seen.partition(text)[2]

    read_until(b"> ")
    # If no answer is running, Ctrl-C prints a new prompt. Just after a prompt, Python may miss a signal, so it is sent
    # until the prompt appears.
    process.send_signal(signal.SIGINT)
    while not select.select([controller], [], [], 1)[0]:
        process.send_signal(signal.SIGINT)
    read_until(b"> ")
    os.write(controller, b"Return\n")
    read_until(b"[length; prompt: ")
    read_until(b"> ")
    os.write(controller, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(controller)


def test_ctrl_c_keeps_the_text_printed_so_far(chat_program, llm):
    command = [*COMMAND, "run", chat_program, "--no-chat", "--prompt", PROMPT]
    # Without Ctrl-C, the answer would fill the context.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    text = (first + out).decode()
    assert process.returncode == 130, err
    whole = llm.generate(PROMPT).result()
    assert text.endswith("\n") and whole.text.startswith(text[:-1]) and 0 < len(text) - 1 < len(whole.text)
    assert err.decode().startswith("[cancelled; prompt: ")


def test_closed_pipe_ends_the_answer(chat_program):
    command = [*COMMAND, "run", chat_program, "--prompt", PROMPT]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=60) == 1


def test_profile_has_an_event_for_each_instruction(run_in_process, chat_program, tmp_path):
    command = ["run", chat_program, "--prompt", PROMPT, "--max-new-tokens", 3, "--profile"]
    done = run_in_process(*command, tmp_path / "run.etdp")
    assert done.returncode == 0, done.stderr
    blocks = Inspector(etdump_path=str(tmp_path / "run.etdp")).event_blocks
    events = [event for block in blocks for event in block.events if event.is_delegated_op]
    counts = {event.name: len(event.perf_data.raw) for event in events}
    assert counts["0.0 SymSizeNode"] == 3 and any(name.endswith("SdpaNode") for name in counts)
    done = run_in_process(*command, tmp_path / "no" / "run.etdp")
    assert done.returncode == 1 and "No such file or directory" in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt", "x", "--system", "y", "--no-chat"], "--no-chat: expected --prompt, and neither --system nor"),
        (["--no-chat"], "--no-chat: expected --prompt"),
        (["--prompt", "x", "--repetition-penalty", "0"], "repetition_penalty: got 0.0, expected more than 0"),
        (["--prompt", "x", "--tokenizer", str(small_llm.DEMO), "--chat"], "has no chat template"),
        (["--tokenizer", str(small_llm.DEMO)], "has no chat template"),
        (["--prompt", "x " * small_llm.CONTEXT], f"expected 1 to {small_llm.CONTEXT}"),
        (["--prompt", "x\udcff"], "text: character 1 is a lone surrogate"),  # an argument that is not UTF-8
    ],
)
def test_invalid_request_is_one_line_on_stderr(run_in_process, chat_program, arguments, message):
    done = run_in_process("run", chat_program, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("executorch-mlx: ") and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--prompt", "-"], []], ids=str)
def test_input_that_is_not_utf8_is_an_error(capfd, monkeypatch, chat_program, arguments):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\xff"), encoding="utf-8"))
    assert main(["run", str(chat_program), *arguments]) == 1
    message = "executorch-mlx: standard input: 'utf-8' codec can't decode byte 0xff in position 1: invalid start byte\n"
    assert capfd.readouterr().err == message


def test_command_without_standard_output(monkeypatch, chat_program):
    monkeypatch.setattr(
        sys, "argv", ["executorch-mlx", "run", str(chat_program), "--prompt", "x", "--max-new-tokens", "1"]
    )
    monkeypatch.setattr(sys, "stdout", None)
    assert console() == 0


def test_chat_goes_on_without_the_message_of_a_failed_answer(monkeypatch, chat_program):
    """On a terminal, the chat continues after an error. Messages must still alternate between user and assistant."""
    arguments = argparse.ArgumentParser()
    add_to(arguments.add_subparsers())
    options = arguments.parse_args(["run", str(chat_program), "--max-new-tokens", "2"])
    session = Session(LLM.load(chat_program), options, {"max_new_tokens": 2}, chat=True)
    limit = memory.set_memory_limit(memory.get_active_memory() + 1000)
    try:
        with pytest.raises(CommandError, match="memory limit"):
            session.answer("Return")
    finally:
        memory.set_memory_limit(limit)
    session.answer("More")
    assert [message["role"] for message in session.messages] == ["user", "assistant"]


def test_a_chat_that_has_filled_its_context_says_how_to_go_on(chat_program):
    arguments = argparse.ArgumentParser()
    add_to(arguments.add_subparsers())
    session = Session(LLM.load(chat_program), arguments.parse_args(["run", str(chat_program)]), {}, chat=True)
    with pytest.raises(CommandError) as caught:
        session.answer("word " * 2000)  # alone, it is too long
    assert "/clear" not in str(caught.value)
    session.messages = [{"role": "user", "content": "word " * 2000}, {"role": "assistant", "content": "x"}]
    with pytest.raises(CommandError, match="The chat has filled the context: /clear starts a new one"):
        session.answer("More")


def test_version(capfd):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capfd.readouterr().out == f"executorch-mlx {importlib.metadata.version('executorch-mlx')}\n"


def test_missing_and_invalid_files(run_in_process, tmp_path):
    done = run_in_process("run", tmp_path / "none.pte", "--prompt", "x")
    assert done.returncode == 1 and "No such file" in done.stderr
    done = run_in_process("run", tmp_path, "--prompt", "x")
    assert (
        done.returncode == 1 and f"executorch-mlx: {tmp_path}: got an empty folder, expected a .pte file" in done.stderr
    )
    Path(tmp_path / "text.pte").write_text("not a program, but long enough to be read as one" * 9)
    done = run_in_process("run", tmp_path / "text.pte", "--prompt", "x")
    assert done.returncode == 1 and f"executorch-mlx: {tmp_path}/text.pte: " in done.stderr
