"""`executorch-mlx doctor`: its report on a working installation and on broken ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from executorch_mlx.cli.main import main


def doctor(*arguments, **environment) -> tuple[int, list[str]]:
    """Return the exit code of the command and the lines that it prints.

    The command runs in a process of its own, because a process can register a delegate only once.
    """
    done = subprocess.run(
        [sys.executable, "-m", "executorch_mlx.cli.main", "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=300,
    )
    return done.returncode, done.stdout.splitlines()


def errors(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("error: ")]


def test_a_working_installation_is_ok(delegate):
    code, lines = doctor()
    assert code == 0 and lines[-1] == "ok", lines
    facts = dict(line.split(maxsplit=1) for line in lines[:-1])
    assert facts["executorch"] == "1.5.1" and facts["torch"].startswith("2.13.0")
    assert facts["delegate"] == delegate
    assert "libmlx" in facts["libmlx"] and facts["program"] == "runs"
    assert errors(lines) == []


@pytest.mark.parametrize("content", [None, b"no library"], ids=["missing", "not a library"])
def test_a_delegate_that_does_not_load_is_an_error(tmp_path, content):
    library = tmp_path / "libmlx_delegate.so"
    if content is not None:
        library.write_bytes(content)
    code, lines = doctor("--library", library)
    assert code == 1
    (error,) = errors(lines)
    assert str(library) in error


def test_an_unknown_device_is_an_error(delegate):
    code, lines = doctor(EXECUTORCH_MLX_DEVICE="nowhere")
    assert code == 1
    (error,) = errors(lines)
    assert error.startswith("error: program: a small program does not run")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are built on Linux only")
def test_the_instruction_set_of_the_cpu_kernels(delegate):
    code, lines = doctor(EXECUTORCH_MLX_CPU_KERNELS="portable")
    assert code == 0 and "cpu kernels    portable" in lines
    code, lines = doctor(EXECUTORCH_MLX_CPU_KERNELS="sse")
    assert code == 1 and errors(lines)[0].startswith("error: program: a small program does not run")


MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


def test_a_model_that_can_be_exported(tmp_path, capsys):
    """The weights are not read: the folder has none."""
    shutil.copy(MODEL / "config.json", tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "LlamaForCausalLM"] and lines[-1] == "ok"
    assert "4 with attention with 2 key heads of 32, 128 numbers per token" in lines[2]


def test_a_gguf_file(tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    assert main(["doctor", "--model", str(tmp_path / "m.gguf")]) == 1
    assert "m.gguf: general.architecture: got mamba, expected one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layer_types": ["indexed_attention"] * 4}, "LlamaForCausalLM: got layers of kind indexed_attention"),
        ({"model_type": "unknown"}, "transformers cannot build a causal language model from this config"),
    ],
)
def test_a_model_that_cannot_be_exported(tmp_path, capsys, changes, message):
    config = json.loads((MODEL / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    assert message in errors(capsys.readouterr().out.splitlines())[0]
