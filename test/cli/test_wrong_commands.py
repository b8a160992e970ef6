"""What newcomers type first: each wrong command is answered in one line that names the remedy."""

import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
import small_llm
from executorch_mlx.cli import extras, model_arguments
from executorch_mlx.cli.main import main
from executorch_mlx.llm import export as llm_export

DEMO = str(small_llm.DEMO)
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBBI", 13, b"IHDR", 1, 1, 8, 0, 0, 0, 0, zlib.crc32(b"")) + b"\0" * 40


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """The path of a program that is no language model."""
    import torch
    from executorch.exir import to_edge_transform_and_lower
    from executorch_mlx import MLXPartitioner

    exported = torch.export.export(torch.nn.Linear(4, 2).eval(), (torch.randn(1, 4),))
    path = tmp_path_factory.mktemp("classifier") / "classifier.pte"
    path.write_bytes(to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch().buffer)
    return path


@pytest.fixture
def files(tmp_path, monkeypatch, classifier) -> Path:
    """The current folder, with files that are not what a command expects."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "image.png").write_bytes(PNG)
    (tmp_path / "notes.txt").write_text("Return the value")
    (tmp_path / "notes.jsonl").write_text("Return the value")
    (tmp_path / "talk.wav").write_bytes(b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}" + b"\0" * 40)
    (tmp_path / "broken.pte").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "classifier.pte").symlink_to(classifier)
    return tmp_path


@pytest.mark.parametrize(
    "command, message",
    [
        (
            "run classifier.pte --prompt Hi",
            "classifier.pte: got a program with the methods forward, expected a language",
        ),
        ("serve classifier.pte", "classifier.pte: got a program with the methods forward, expected a language"),
        ("transcribe classifier.pte talk.wav", "got a program with the methods forward, expected a language or speech"),
        ("run image.png", "image.png: got a PNG picture, expected a .pte file, a checkpoint folder"),
        ("chat notes.txt", "notes.txt: got a text file, expected a .pte file, a checkpoint folder"),
        ("serve talk.wav", "talk.wav: got a WAV sound file, expected a .pte file"),
        ("run model.safetensors", "got a safetensors file, one of the files of a checkpoint folder, expected a .pte"),
        ("run broken.pte", "broken.pte: got an empty file, expected a .pte file"),
        ("run empty", "empty: got an empty folder, expected a .pte file, a checkpoint folder"),
        ("serve adapter", "adapter: got a folder with an adapter, which --adapter takes beside its model"),
        ("run .", ".: got a folder with a program, broken.pte, expected a .pte file"),
        ("run missing.pte", "missing.pte: No such file or folder, expected a .pte file"),
        ("run ./missing", "./missing: No such file or folder, expected a .pte file"),
        ("run owner/missing", "owner/missing is not a folder or a GGUF file, and the hub did not provide it: "),
        ("export image.png -o x.pte", "image.png: got a PNG picture, expected a checkpoint folder"),
        ("export empty -o x.pte", "empty: got an empty folder, expected a checkpoint folder"),
        ("export classifier.pte -o x.pte", "classifier.pte: got a program, expected a checkpoint folder"),
        (f"export {DEMO} -o /sys/x.pte", "--output: cannot write to the folder of /sys/x.pte: "),
        (f"export {DEMO} -o none/x.pte", "--output: got none/x.pte, expected a file in an existing folder"),
        ("run CHAT --prompt Hi --temperature -1", "--temperature: got -1, expected at least 0"),
        ("run CHAT --prompt Hi --top-p 7", "--top-p: got 7, expected 0 to 1"),
        ("run CHAT --prompt Hi --quantize int4", "--quantize: CHAT is exported already, expected a checkpoint"),
        ("run CHAT --prompt Hi --tokenizer empty", "tokenizer: empty has no tokenizer.json"),
        ("transcribe CHAT talk.wav", "got a language model, expected a speech model; executorch-mlx run runs it"),
        ("embed CHAT Hi", "got a language model, which executorch-mlx run runs, expected an encoder"),
        (f"run {DEMO} --chat-template none", "--chat-template: none: No such file or folder"),
        (f"run {DEMO} --tokenizer none", "--tokenizer: none: No such file or folder"),
        (f"run {DEMO} --prompt Hi --max-new-tokens -3", "--max-new-tokens: got -3, expected at least 0"),
        (f"run {DEMO} --adapter x=none", "--adapter x: none/adapter_config.json: No such file or directory"),
        ("batch CHAT none.jsonl -o x.jsonl", "none.jsonl: No such file or directory"),
        (f"finetune {DEMO} notes.jsonl -o empty", "notes.jsonl:1: "),
        ("inspect image.png", "image.png is not a .pte file: got b"),
        ("rm tiny", "tiny: not in executorch-mlx list"),
    ],
    ids=lambda value: value.split(" ", 1)[0],
)
def test_wrong_command(files, chat_program, capfd, command, message):
    words = [str(chat_program) if word == "CHAT" else word for word in command.split()]
    assert main(words) == 1
    printed = capfd.readouterr()
    assert printed.err.count("\n") == 1 and printed.err.startswith("executorch-mlx: "), printed.err
    assert message.replace("CHAT", str(chat_program)) in printed.err and printed.out == ""


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("command", ["run CHAT", f"serve {DEMO}", f"embed {DEMO} Hi", f"transcribe {DEMO} talk.wav"])
def test_missing_gpu_is_reported_before_an_export(files, chat_program, capfd, monkeypatch, command, variable):
    monkeypatch.setattr(mx, "is_available", lambda device: device != mx.gpu)
    words = command.replace("CHAT", str(chat_program)).split()
    if variable:
        monkeypatch.setenv("EXECUTORCH_MLX_DEVICE", "gpu")
    assert main(words if variable else [*words, "--device", "gpu"]) == 1
    name = "EXECUTORCH_MLX_DEVICE" if variable else "--device"
    assert capfd.readouterr().err == f"executorch-mlx: {name}: got gpu, but MLX finds no GPU here\n"


@pytest.mark.parametrize(
    "command, expected", [(f"transcribe {DEMO} talk.wav", "a speech model"), (f"embed {DEMO} Hi", "an encoder")]
)
def test_a_checkpoint_of_another_kind_is_not_exported(files, capfd, monkeypatch, command, expected):
    """The process of the export refuses it. Here, it is a call."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(files))
    monkeypatch.setattr(llm_export, "export_llm", None)
    monkeypatch.setattr(
        model_arguments.subprocess, "run", lambda words, **_: SimpleNamespace(returncode=main(words[3:]))
    )
    assert main(command.split()) == 1
    error = f"executorch-mlx: {DEMO}: got a language model, expected {expected}; executorch-mlx run runs it"
    assert capfd.readouterr().err.splitlines()[-1] == error


@pytest.mark.parametrize(
    "command, message",
    [
        ("run CHAT Hi", "got Hi, which run does not take: --prompt takes a prompt; see executorch-mlx run --help"),
        ("chat CHAT --colour blue", "got --colour blue, which chat does not take; see executorch-mlx chat --help"),
        ("run", "the following arguments are required: MODEL; see executorch-mlx run --help"),
        ("run CHAT --seed abc", "argument --seed: invalid int value: 'abc'; see executorch-mlx run --help"),
        ("generate CHAT", "argument COMMAND: invalid choice: 'generate' (choose from "),
    ],
)
def test_wrong_usage(files, capfd, command, message):
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    printed = capfd.readouterr()
    assert caught.value.code == 2 and printed.err.count("\n") == 1 and printed.out == ""
    assert printed.err.startswith(f"executorch-mlx: {message}")


@pytest.mark.parametrize(
    "command, extra",
    [(f"export {DEMO} -o x.pte", "export"), (f"run {DEMO} --dtype float16", "export"), ("serve CHAT", "serve")],
)
def test_missing_extra(files, chat_program, capfd, monkeypatch, command, extra):
    monkeypatch.setenv("XDG_CACHE_HOME", str(files))
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert main([str(chat_program) if word == "CHAT" else word for word in command.split()]) == 1
    assert f"pip install 'executorch-mlx[{extra}]'" in capfd.readouterr().err
