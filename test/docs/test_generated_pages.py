"""Generated files are current, and the reference pages are complete."""

import importlib
import inspect
import re
import subprocess
import sys

import pytest
from markdown_pages import ROOT

PUBLIC_MODULES = ("executorch_mlx", "executorch_mlx.llm", "executorch_mlx.llm.export", "executorch_mlx.serve")
PUBLIC_MODULES += ("executorch_mlx.random", "executorch_mlx.speech", "executorch_mlx.speech.export")


GENERATORS = ("docs/figures/architecture.py", "tools/docs/operators.py", "tools/docs/reference.py")


@pytest.mark.parametrize("script", GENERATORS)
def test_generated_file_is_current(script):
    done = subprocess.run([sys.executable, "-W", "ignore", ROOT / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run python {script}\n{done.stderr}"


def documented() -> list[str]:
    """Return the names in the headings of docs/python-api.md."""
    return re.findall(r"^### `([\w.]+)`$", (ROOT / "docs" / "python-api.md").read_text(), re.MULTILINE)


def resolve(name: str):
    """Return the object with a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_is_documented(module):
    known = [resolve(name) for name in documented()]
    public = importlib.import_module(module)
    missing = [name for name in public.__all__ if not any(getattr(public, name) is found for found in known)]
    assert missing == []


@pytest.mark.parametrize("name", documented())
def test_documented_name_has_a_docstring(name):
    found = resolve(name)
    if callable(found):
        assert inspect.getdoc(found), name


def test_documented_options_exist():
    """Every option in the guides is an option of a command, or of a script that the page names."""
    known = {"--model", "--tasks"}  # of lm-eval
    known |= options(ROOT / "build" / "mlx_llm_runner")
    for name in ("export", "run", "chat", "serve", "batch", "transcribe", "inspect", "pull", "list", "rm"):
        known |= options(sys.executable, "-m", "executorch_mlx.cli.main", name)
    guides = ("language-models", "speech", "server", "batch", "cluster", "sampling", "undelegated-nodes")
    for page in ("README", *(f"docs/{guide}" for guide in guides)):
        text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
        of_scripts = options_of_scripts(text)
        used = re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
        assert set(used) - known - of_scripts == set(), page


def options(*command: object) -> set[str]:
    help_text = subprocess.run([*command, "--help"], capture_output=True, text=True).stdout
    return set(re.findall(r"--[a-z][a-z-]+", help_text))


def options_of_scripts(page: str) -> set[str]:
    """The options that the Python scripts named in `page` declare."""
    scripts = set(re.findall(r"\b(?:benchmarks|examples|test|tools)/[\w/]+\.py\b", page))
    texts = [(ROOT / script).read_text(encoding="utf-8") for script in scripts]
    return set(re.findall(r"""["'](--[a-z][a-z-]+)["']""", "\n".join(texts)))
