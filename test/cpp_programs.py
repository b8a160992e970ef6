"""Finds the C++ programs that the tests run."""

import os
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
