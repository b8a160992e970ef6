"""mlx_llm_runner, and the programs it is given."""

from collections.abc import Callable
from pathlib import Path

import llm_programs as programs
import pytest
from llm_cli import Run


@pytest.fixture(scope="session")
def run() -> type[Run]:
    return Run


@pytest.fixture(scope="session")
def program(tmp_path_factory) -> Callable[..., Path]:
    """`program(name, draw, **options)`: exported once for each name."""
    folder = tmp_path_factory.mktemp("programs")

    def make(name: str, draw, **options) -> Path:
        path = folder / f"{name}.pte"
        return path if path.exists() else programs.export(path, draw, **options)

    return make


@pytest.fixture(scope="session")
def successor(program) -> Path:
    """Token i is followed by i + 1, from a context of 1,000 positions."""
    return program("successor", programs.successor, max_context_len=1000)
