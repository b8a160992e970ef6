"""The console script `mlx_llm_runner`: it finds the C++ executable and replaces its own process with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import executorch_mlx
import pytest
from executorch_mlx.cli.llm_runner import NAME, find_executable

PACKAGE = Path(executorch_mlx.__file__).resolve().parent
MODULE = "executorch_mlx.cli.llm_runner"


@pytest.fixture
def package(tmp_path) -> Path:
    """A folder with a package that has the script but not the C++ executable."""
    copy = tmp_path / "site" / "executorch_mlx"
    for file in ("__init__.py", "quiet.py", "cli/__init__.py", "cli/llm_runner.py"):
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / file, copy / file)
    return copy


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-m", MODULE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=package.parent)


def test_it_runs_the_executable_of_this_checkout():
    done = subprocess.run([sys.executable, "-m", MODULE, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: mlx_llm_runner MODEL.pte"), done.stderr
    assert find_executable().name == NAME


def test_arguments_and_exit_status_are_those_of_the_installed_executable(package):
    executable = package / "bin" / NAME
    executable.parent.mkdir()
    executable.write_text('#!/bin/sh\nprintf "<%s>" "$@"\nexit 130\n')
    executable.chmod(0o755)
    done = run(package, "a b", "--seed", "7", "")
    assert (done.returncode, done.stdout, done.stderr) == (130, "<a b><--seed><7><>", "")


def test_a_missing_executable_is_an_error(package):
    done = run(package, "--help")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mlx_llm_runner: the C++ executable is not built (searched ")
    assert str(package / "bin" / NAME) in done.stderr and done.stderr.endswith(": run make build\n")
