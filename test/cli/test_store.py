"""The store of exported programs, and downloads from a hub."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import small_llm
from executorch_mlx.cli import store
from executorch_mlx.cli.main import main
from executorch_mlx.llm import hub
from fake_hub import fake_hub


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("not a part of the model")
    return folder


class Exporter:
    """Makes programs in place of an export, and counts them."""

    def __init__(self):
        self.count, self.notes = 0, []

    def __call__(self, model, **options) -> store.Export:
        return store.export(str(model), options, [], self.run, self.notes.append)

    def run(self, checkpoint: Path, program: Path, lock: int) -> None:
        self.count += 1
        program.write_bytes((checkpoint / "model.safetensors").read_bytes() if checkpoint.is_dir() else b"gguf")


def test_a_checkpoint_is_exported_once(checkpoint, monkeypatch):
    export = Exporter()
    assert store.find(str(checkpoint), {}) is None
    made = export(checkpoint)
    assert made.path.read_bytes() == b"weights" and made.path.name.startswith("tiny-")
    monkeypatch.setattr(store, "_hash", None)  # reads the files
    monkeypatch.chdir(checkpoint.parent)
    assert store.find("tiny", {}) == made and export.count == 1
    assert [Path(name).name for name in made.files] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("changed", ["contents", "options", "version"])
def test_a_change_leads_to_another_export(checkpoint, monkeypatch, changed):
    export = Exporter()
    first, options = export(checkpoint), {}
    if changed == "contents":
        (checkpoint / "model.safetensors").write_bytes(b"heavier weights")
    elif changed == "options":
        options = {"quantize": "int4"}
    else:
        monkeypatch.setattr(store, "_version", lambda: "another")
    assert store.find(str(checkpoint), options) is None
    second = export(checkpoint, **options)
    assert export.count == 2 and second.path != first.path and store.find(str(checkpoint), options) == second
    assert first.path.exists() == (changed != "contents")


def test_the_same_contents_are_exported_once(checkpoint, tmp_path):
    export = Exporter()
    first = export(checkpoint)
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    assert store.find(str(checkpoint), {}) is None and export(checkpoint).path == first.path
    copy = shutil.copytree(checkpoint, tmp_path / "copy" / "tiny")
    assert export(copy).path == first.path and export.count == 1
    assert store.find(str(checkpoint), {}) and store.find(str(copy), {})


def test_exports_at_the_same_time_make_one_program(checkpoint):
    export, made, begun, end = Exporter(), [], threading.Event(), threading.Event()
    write = export.run

    def slow(*arguments):
        begun.set()
        end.wait()
        write(*arguments)

    export.run = slow
    threads = [threading.Thread(target=lambda: made.append(export(checkpoint))) for _ in range(3)]
    threads[0].start()
    begun.wait()
    for thread in threads[1:]:
        thread.start()
    while len(export.notes) < 2:  # the others wait
        pass
    end.set()
    for thread in threads:
        thread.join()
    assert export.count == 1 and made == [made[0]] * 3


def test_a_killed_export_leaves_nothing_broken(checkpoint):
    """The leftover of the killed process is what `ExportedLLM.save` writes before the program is complete."""
    export, write = Exporter(), Exporter().run

    def killed(checkpoint, program, lock):
        partial = program.parent / f".{program.name}.xyz"
        partial.mkdir()
        (partial / "model.pte").write_bytes(b"wei")
        raise KeyboardInterrupt

    export.run = killed
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint)
    assert store.find(str(checkpoint), {}) is None and store.exports() == []
    export.run = write
    made = export(checkpoint)
    assert made.path.read_bytes() == b"weights" and os.listdir(made.path.parent) == [made.path.name]


def test_damaged_records_and_missing_programs_are_exported_again(checkpoint, cache):
    export = Exporter()
    made = export(checkpoint)
    (record,) = (cache / "executorch-mlx" / "exports").iterdir()
    record.write_text(record.read_text()[:-9])
    assert store.find(str(checkpoint), {}) is None
    made.path.unlink()
    assert export(checkpoint) == made and store.find(str(checkpoint), {}) == made


def test_list_and_rm(checkpoint, tmp_path, capsys):
    export = Exporter()
    made = [export(checkpoint), export(checkpoint, quantize="int4")]
    other = export(shutil.copytree(checkpoint, tmp_path / "other"))
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    models = [[str(tmp_path / "other")], [str(checkpoint)], [str(checkpoint), "--quantize", "int4"]]
    assert [line.split()[3:] for line in lines] == sorted(models)
    assert main(["rm", "tiny"]) == 0 and store.exports() == [other]
    assert not any(export.path.exists() for export in made)
    assert main(["rm", "tiny"]) == 1 and "tiny: not in executorch-mlx list" in capsys.readouterr().err
    assert main(["rm", "--all"]) == 0 and store.exports() == []


def test_a_program_of_the_hub_needs_no_local_copy(monkeypatch, checkpoint):
    export = Exporter()
    monkeypatch.setattr(hub, "download", lambda model: checkpoint)
    made = export("owner/tiny")
    shutil.rmtree(checkpoint)
    assert store.find("owner/tiny", {}) == made


# Downloads -----------------------------------------------------------------------------

REPOSITORY = {
    "config.json": b'{"architectures": []}',
    "generation_config.json": b'{"top_k": 5}',
    "tokenizer.json": b'{"model": {}}',
    "additional_chat_templates/tool_use.jinja": b"x",
    "model-00001-of-00001.safetensors": b"w" * 100,
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "README.md": b"text",
}
NEEDLESS = {
    "pytorch_model.bin": b"b" * 100,
    "consolidated.safetensors": b"c" * 100,
    "onnx/model.onnx": b"o" * 100,
    "onnx/config.json": b"{}",
    "original/consolidated.00.pth": b"p" * 100,
    "tiny-Q4_K_M.gguf": b"g" * 100,
    "model.msgpack": b"m" * 100,
}


def download(server, model, home):
    """Download a model in a process of its own, which reads the address of the hub when it starts."""
    code = "import sys; from executorch_mlx.llm import hub; print(hub.download(sys.argv[1]))"
    environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", code, model]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_only_the_files_of_an_export_are_downloaded(tmp_path):
    with fake_hub({"owner/tiny": REPOSITORY | NEEDLESS}) as server:
        done = download(server, "owner/tiny", tmp_path / "home")
        assert done.returncode == 0, done.stderr
        expected = sorted(name for name in REPOSITORY if name != "README.md")
        assert sorted(server.downloads) == expected
        folder = Path(done.stdout.strip())
        assert sorted(str(f.relative_to(folder)) for f in hub.checkpoint_files(folder)) == expected
        assert download(server, "owner/tiny", tmp_path / "home").returncode == 0
        assert sorted(server.downloads) == expected


def test_old_weights_are_downloaded_if_there_are_no_others(tmp_path):
    files = {"config.json": b"{}", "pytorch_model.bin": b"w", "tf_model.h5": b"t"}
    with fake_hub({"old": files}) as server:
        assert download(server, "old", tmp_path / "home").returncode == 0
    assert sorted(server.downloads) == ["config.json", "pytorch_model.bin"]


def test_gguf_files_of_the_hub(tmp_path):
    with fake_hub({"owner/tiny-GGUF": {"a-Q4.gguf": b"GGUF4", "a-Q8.gguf": b"GGUF8", "README.md": b""}}) as server:
        done = download(server, "owner/tiny-GGUF", tmp_path / "home")
        assert "expected one of them, such as owner/tiny-GGUF/a-Q4.gguf" in done.stderr
        done = download(server, "owner/tiny-GGUF/a-Q8.gguf", tmp_path / "home")
        assert Path(done.stdout.strip()).read_bytes() == b"GGUF8" and server.downloads == ["a-Q8.gguf"]


def test_unknown_models_of_the_hub_are_one_line(tmp_path):
    with fake_hub({}) as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "executorch_mlx", "run", "owner/none", "--prompt", "x"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "owner/none is not a folder or a GGUF file, and the hub did not provide it: 404" in done.stderr


# From a checkpoint to text ----------------------------------------------------------------

BLOCKED = """\
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
"""


def test_second_run_of_a_folder_needs_neither_torch_nor_transformers(tmp_path, capfd):
    folder, blocked = tmp_path / "small", tmp_path / "blocked"
    small_llm.model().save_pretrained(folder)
    small_llm.tokenizer().save_pretrained(folder)
    run = ["run", str(folder), "--no-verify", "--batch", "1", "--prompt", "Return", "--max-new-tokens", "4", "--json"]
    assert main(run) == 0
    printed = capfd.readouterr()
    assert "exporting it once" in printed.err
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(BLOCKED)
    environment = os.environ | {"PYTHONPATH": str(blocked)}
    command = [sys.executable, "-m", "executorch_mlx", *run]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert json.loads(done.stdout)["tokens"] == json.loads(printed.out)["tokens"]
