"""Fixtures: mlx_llm_runner, and the programs that it runs."""

from collections.abc import Callable
from pathlib import Path

import llm_programs as programs
import pytest
from llm_runner import Run


@pytest.fixture(scope="session")
def run() -> type[Run]:
    return Run


@pytest.fixture(scope="session")
def program(tmp_path_factory) -> Callable[..., Path]:
    """`program(name, rule, **options)` exports a program on the first call with that name."""
    folder = tmp_path_factory.mktemp("programs")

    def make(name: str, rule, **options) -> Path:
        path = folder / f"{name}.pte"
        return path if path.exists() else programs.export(path, rule, **options)

    return make


@pytest.fixture(scope="session")
def successor(program) -> Path:
    """A program that returns token i + 1 after token i. Its context has 1,000 positions."""
    return program("successor", programs.successor, max_context_len=1000)
