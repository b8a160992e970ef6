"""Our delegate and another one named MLXBackend in one process, loaded in either order. Each test starts a process.

The executorch wheel for macOS contains such a delegate. Here, a small library stands in for it. In the processes of
these tests, the import of ExecuTorch's Python bindings loads this library.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from compile_cpp import compile_cpp
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, loader

ROOT = Path(__file__).resolve().parents[2]
USER_SOURCES = ("docs", "examples", "benchmarks")
REMEDY = "write `from executorch_mlx import Runtime`, or call executorch_mlx.load_delegate(), before that import"
OURS, THEIRS = "2.0", "42.0"  # what PRINT_RESULT prints: x + 1 for x = 1, and the constant of other_delegate.cpp

SITE_CUSTOMIZE = """
import ctypes, sys

def load_with_the_bindings(event, arguments):
    if event == "import" and arguments[0] == "executorch.extension.pybindings._C":
        ctypes.CDLL({library!r})

sys.addaudithook(load_with_the_bindings)
"""

PRINT_RESULT = """
import sys, torch
program = Runtime.get().load_program(sys.argv[1])  # which a method of executorch.runtime does not keep
print(program.load_method("forward").execute([torch.ones(())])[0].item())
"""


@pytest.fixture(scope="module")
def other_delegate(tmp_path_factory) -> Path:
    """The path of the library that other_delegate.cpp compiles to."""
    (wheel,) = find_spec("executorch").submodule_search_locations
    include = f"{wheel}/include"
    return compile_cpp(
        tmp_path_factory.mktemp("other") / "libother_delegate.so",
        "-shared",
        "-fPIC",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        f"-I{include}",
        f"-I{include}/executorch/runtime/core/portable_type/c10",
        Path(__file__).with_name("other_delegate.cpp"),
        f"-L{wheel}/lib",
        "-lexecutorch",
        f"-Wl,-rpath,{wheel}/lib",
    )


@pytest.fixture(scope="module")
def python(other_delegate, tmp_path_factory):
    """A function that runs Python source in a process where ExecuTorch's bindings load the other delegate."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE_CUSTOMIZE.format(library=str(other_delegate)))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(source: str, *arguments: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", source, *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    return run


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The path of a program without extensions that computes x + 1."""

    class AddOne(torch.nn.Module):
        def forward(self, x):
            return x + 1

    exported = torch.export.export(AddOne(), (torch.ones(()),))
    path = tmp_path_factory.mktemp("program") / "add_one.pte"
    path.write_bytes(to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch().buffer)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
def test_loader_loads_every_library_of_the_wheels_that_the_delegate_links(delegate):
    lines = subprocess.check_output(["readelf", "-d", delegate], text=True)
    linked = set(re.findall(r"NEEDED.*\[(lib(?:executorch|mlx)\w*)\.so\]", lines))
    assert linked == {"libmlx_cpu_kernels", *(library for _, library in loader._LINKED_LIBRARIES)}


def test_docs_and_examples_import_runtime_from_executorch_mlx():
    """If a file imported `executorch.runtime` first, that would register the other delegate."""
    without_our_delegate = ROOT / "benchmarks" / "llm" / "xnnpack.py"
    files = [ROOT / "README.md", *(file for name in USER_SOURCES for file in (ROOT / name).rglob("*.[mp][dy]"))]
    assert len(files) > 30
    found = {file for file in files if re.search(r"^\s*(from|import) executorch\.runtime", file.read_text(), re.M)}
    assert found == {without_our_delegate}


@pytest.mark.parametrize(
    "imports",
    [
        "from executorch_mlx import Runtime",
        "from executorch_mlx import Runtime; from executorch.runtime import Runtime",
        "from executorch_mlx import load_delegate; load_delegate(); from executorch.runtime import Runtime",
        "from executorch_mlx import Runtime, load_delegate; assert load_delegate() == load_delegate()",
    ],
    ids=["Runtime", "both", "load_delegate", "twice"],
)
def test_ours_first_runs_programs(python, program, imports):
    done = python(imports + PRINT_RESULT, program)
    assert done.stdout.split() == [OURS], done.stderr
    assert REMEDY not in done.stderr


def test_theirs_first_runs_programs_with_one_warning(python, program):
    source = "import executorch.runtime\n" + "from executorch_mlx import Runtime\n" * 2
    done = python(source + PRINT_RESULT, program)
    assert done.stdout.split() == [THEIRS], done.stderr
    assert done.stderr.count(REMEDY) == 1
    assert "<string>:2: RuntimeWarning" in done.stderr  # the line of the import


LOAD_TWICE = """
import executorch.runtime
from executorch_mlx import load_delegate
for _ in range(2):
    try:
        load_delegate()
    except RuntimeError as error:
        print(error)
"""


def test_theirs_first_is_an_error_of_every_load(python):
    done = python(LOAD_TWICE)
    assert done.stdout.count(REMEDY) == 2, done.stderr


THEIRS_FIRST = "import executorch.runtime\n"
MAIN = "import sys; from executorch_mlx.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("command", ["run", "serve"])
def test_commands_say_why_they_fail(python, program, command):
    model = program if command == "run" else program.stem  # the server knows a model by its name
    done = python(THEIRS_FIRST + MAIN, command, program)
    assert done.returncode == 1
    assert done.stderr.count(REMEDY) == 1 and f"executorch-mlx: {model}: " in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_register_ours_first(python, chat_program):
    done = python(MAIN, "run", chat_program, "--prompt", "a", "--max-new-tokens", 2)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "first, code, answer",
    [("", 0, "this delegate"), (THEIRS_FIRST, 1, "another library")],
    ids=["ours first", "theirs first"],
)
def test_doctor_says_which_delegate_answers(python, first, code, answer):
    done = python(first + MAIN, "doctor")
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    assert facts["MLXBackend"] == answer
    assert done.returncode == code
    assert done.stdout.count(REMEDY) == code
