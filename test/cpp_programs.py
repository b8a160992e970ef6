"""Finds the C++ programs that the tests run, and builds CMake projects that use this package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# The build whose libraries Python loads.
BUILD = Path(os.environ.get("EXECUTORCH_MLX_BUILD") or Path(__file__).resolve().parents[1] / "build")
# With EXECUTORCH_MLX_TEST_PROGRAMS, the tests run the programs of another build: those for arm64, under emulation.
PROGRAMS = Path(os.environ.get("EXECUTORCH_MLX_TEST_PROGRAMS") or BUILD).resolve()


def find_program(name: str) -> Path:
    """The path of a program. Fails the test if it is missing."""
    path = PROGRAMS / name
    if not path.exists():
        pytest.fail(f"{path} is not built: cmake --build {BUILD}")
    return path


def build_project(source: Path, folder: Path) -> Path:
    """Build the CMake project `source` in `folder`."""
    # Prefer CMake from PyPI: that of the system may be too old for the wheels.
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    configure = [
        cmake,
        "-S",
        source,
        "-B",
        folder,
        f"-Dexecutorch_mlx_DIR={BUILD / 'lib/cmake/executorch_mlx'}",
        *launcher,
    ]
    for command in (configure, [cmake, "--build", folder]):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder
