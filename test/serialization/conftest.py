"""Fixtures: our schema, that of ExecuTorch's own MLX delegate, and conversion to and from JSON with flatc."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from executorch_mlx.serialization import generate


@pytest.fixture(scope="session")
def schema() -> Path:
    """The schema.fbs of this package."""
    return generate.SCHEMA


@pytest.fixture(scope="session")
def official_schema() -> Path:
    """The schema of ExecuTorch's own MLX delegate, in the installed wheel."""
    for root in importlib.util.find_spec("executorch").submodule_search_locations:
        return Path(root, "backends", "mlx", "serialization", "schema.fbs")


def _flatc(*args: object) -> None:
    done = subprocess.run([generate.find_flatc(), *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def to_json(tmp_path_factory):
    """A function `to_json(schema, program)` that converts a FlatBuffer to JSON with flatc.

    The JSON contains every scalar, also those with the default value. An absent optional scalar is null.
    """

    def to_json(schema: Path, program: bytes) -> dict:
        folder = tmp_path_factory.mktemp("json")
        (folder / "program.bin").write_bytes(program)
        flags = ("--json", "--raw-binary", "--strict-json", "--defaults-json")
        _flatc(*flags, "-o", folder, schema, "--", folder / "program.bin")
        return json.loads((folder / "program.json").read_text())

    return to_json


@pytest.fixture(scope="session")
def from_json(tmp_path_factory):
    """A function `from_json(schema, content)` that converts JSON to a FlatBuffer with flatc."""

    def from_json(schema: Path, content: dict) -> bytes:
        folder = tmp_path_factory.mktemp("binary")
        (folder / "program.json").write_text(json.dumps(content))
        _flatc("--binary", "-o", folder, schema, folder / "program.json")
        return (folder / "program.bin").read_bytes()

    return from_json
