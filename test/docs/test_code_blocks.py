"""Runs the Python blocks of the pages and the commands of the guide, and compares the output with that on the page.

The guide is docs/language-models.md. Blocks and commands run in a folder with the files that the blocks use: the
programs that the guide's commands export from the demo model (`demo.pte`, `both.pte`), `chat.pte` (a small model with a
chat template), `model.pte` with `adapters/`, `answer.etdp` (a profile) and `examples/`.
"""

import contextlib
import fcntl
import io
import re
import shlex
import threading
from pathlib import Path

import pytest
from markdown_pages import PAGES, ROOT, blocks

# The blocks of CONTRIBUTING are not run: they are lines to insert into existing files.
BLOCKS = [b for page in PAGES if page.name != "CONTRIBUTING.md" for b in blocks(page) if b.language == "python"]
# The guide shows the output of two of its commands, EXPORT and RUN.
COMMANDS = [b for b in blocks(ROOT / "docs" / "language-models.md") if b.language == "sh"]
EXPORT, RUN = (b for b in COMMANDS if b.output is not None)
OTHER_EXPORTS = [b for b in COMMANDS if b.code.startswith("executorch-mlx export examples/") and b != EXPORT]
MODEL = ROOT / "examples" / "demo_model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, chat_program, delegate) -> Path:
    """The folder with the files. All processes of a parallel test run share it."""
    # executorch.devtools keeps the `sys.stdout` that it finds when it is imported. In a test with `capsys`, this is an
    # object that pytest closes after the test. The import therefore comes before the first test.
    import executorch.devtools  # noqa: F401

    base = tmp_path_factory.getbasetemp()
    parent = base.parent if base.name.startswith("popen-") else base
    folder = parent / "docs"
    with open(parent / "docs.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            create_files(tmp_path_factory.mktemp("docs"), chat_program).rename(folder)
    return folder


def create_files(folder: Path, chat_program: Path) -> Path:
    """Create the files that the blocks use in `folder`, and return the folder."""
    from executorch_mlx.llm import LLM

    (folder / "chat.pte").symlink_to(chat_program)
    (folder / "examples").symlink_to(MODEL.parent)
    (folder / "folder").symlink_to(MODEL)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as output:
        run_command(EXPORT.code)
        (folder / "export.txt").write_text(output.getvalue())
        for block in OTHER_EXPORTS:
            run_command(block.code)
    create_adapters(folder)
    create_vision_model(folder)
    llm = LLM.load(folder / "demo.pte", profile=True)
    llm.generate("Return the", max_new_tokens=1).result()
    llm.program.write_profile(folder / "answer.etdp")
    return folder


def create_adapters(folder: Path) -> None:
    """Create `model.pte`, with room for adapters, and the adapters of docs/adapters.md."""
    from executorch_mlx.llm.export import export_llm
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    options = {"adapters": 2, "lora_rank": 4, "speculation": False, "verify": False}
    export_llm(MODEL, max_context_len=64, **options).save(folder / "model.pte")
    for name in ("poet", "coder"):
        model = AutoModelForCausalLM.from_pretrained(MODEL)
        get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(folder / "adapters" / name)


def create_vision_model(folder: Path) -> None:
    """Create `smolvlm.pte` and a picture for it, and `hears.pte` and a sound, for docs/vision.md."""
    import small_vlm
    import soundfile
    from executorch_mlx.llm.export import export_llm

    for family, name in (("smolvlm", "smolvlm.pte"), ("qwen2_audio", "hears.pte")):
        small_vlm.save(family, folder / family)
        exported = export_llm(folder / family, max_context_len=small_vlm.CONTEXT, speculation=False, verify=False)
        exported.save(folder / name)
    small_vlm.pictures(1, 0)[0].save(folder / "cat.jpg")
    soundfile.write(folder / "question.wav", small_vlm.sounds(1)[0], 16000)


@pytest.fixture
def registry():
    """After the test, removes the handlers and patterns that the block has registered."""
    from executorch_mlx import ops  # noqa: F401  (fills the registry)
    from executorch_mlx.builder.registry import REGISTRY

    handlers, patterns = dict(REGISTRY.handlers), list(REGISTRY.patterns)
    yield
    REGISTRY.handlers.clear()
    REGISTRY.handlers.update(handlers)
    REGISTRY.patterns[:] = patterns


@pytest.fixture
def server(request, folder):
    """The host and port of a server of demo.pte, or None if the block does not connect to a server."""
    if "127.0.0.1:8000" not in request.node.callspec.params["block"].code:
        yield None
        return
    import uvicorn
    from executorch_mlx.llm import LLM
    from executorch_mlx.serve import create_app

    app = create_app(LLM.load(folder / "demo.pte"), name="demo", host="127.0.0.1")
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    bound = running.config.bind_socket()
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
    thread.start()
    yield f"127.0.0.1:{bound.getsockname()[1]}"
    running.should_exit = True
    thread.join()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block(block, folder, registry, server, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    code = block.code.replace("127.0.0.1:8000", server or "")
    exec(compile(code, str(block), "exec"), {"__name__": "__main__"})
    if block.output is not None:
        assert capsys.readouterr().out.rstrip("\n") == block.output.rstrip("\n")


def run_command(line: str) -> None:
    """Run a command line of `executorch-mlx` in this process."""
    from executorch_mlx.cli.main import main

    assert main(shlex.split(line)[1:]) == 0


def test_export_prints_what_the_guide_says(folder):
    printed = (folder / "export.txt").read_text()
    assert hide_differences(printed).rstrip("\n") == hide_differences(EXPORT.output).rstrip("\n")


def hide_differences(text: str) -> str:
    """Return `text` with `?` in place of the differences from eager torch, which depend on the processor."""
    return re.sub(r"\d\.\de-\d\d", "?", text)


def test_run_prints_what_the_guide_says(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run_command(RUN.code)
    assert capsys.readouterr().out.rstrip("\n") == RUN.output.rstrip("\n")


def test_readme_has_the_commands_of_the_guide():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert EXPORT.code in readme and RUN.code.partition(" --max-new-tokens")[0] in readme and RUN.output in readme


def test_main_pages_have_python_blocks():
    pages = {block.page.name for block in BLOCKS}
    assert pages >= {"README.md", "write-an-operator.md", "write-a-composite.md", "write-a-pattern.md"}


def test_quoted_lines_are_in_the_files():
    """The four steps of write-an-operator.md quote lines that the named files contain."""
    page = (ROOT / "docs" / "write-an-operator.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\d\. .*?`([\w/.]+/[\w/.]+)`.*?\n\n((?: {8}[^\n]*\n)+)\n", page, re.MULTILINE | re.DOTALL)
    assert len(steps) == 4
    for file, quoted in steps:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert " ".join(quoted.split()) in " ".join(text.split()), (file, quoted)
