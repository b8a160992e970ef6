"""flatc and the two schemas: the judges of what is on the wire."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from executorch_mlx.serialization import generate


@pytest.fixture(scope="session")
def schema() -> Path:
    """Our schema.fbs."""
    return generate.SCHEMA


@pytest.fixture(scope="session")
def official_schema() -> Path:
    """The schema of the installed executorch wheel's own MLX delegate."""
    for root in importlib.util.find_spec("executorch").submodule_search_locations:
        return Path(root, "backends", "mlx", "serialization", "schema.fbs")


def _flatc(*args: object) -> None:
    done = subprocess.run([generate.find_flatc(), *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def to_json(tmp_path_factory):
    """(schema, FlatBuffer) -> what flatc reads in it. Every scalar is spelled out, an
    optional one that is absent as null."""

    def to_json(schema: Path, program: bytes) -> dict:
        folder = tmp_path_factory.mktemp("json")
        (folder / "program.bin").write_bytes(program)
        flags = ("--json", "--raw-binary", "--strict-json", "--defaults-json")
        _flatc(*flags, "-o", folder, schema, "--", folder / "program.bin")
        return json.loads((folder / "program.json").read_text())

    return to_json


@pytest.fixture(scope="session")
def from_json(tmp_path_factory):
    """(schema, JSON) -> the FlatBuffer that flatc writes."""

    def from_json(schema: Path, content: dict) -> bytes:
        folder = tmp_path_factory.mktemp("binary")
        (folder / "program.json").write_text(json.dumps(content))
        _flatc("--binary", "-o", folder, schema, folder / "program.json")
        return (folder / "program.bin").read_bytes()

    return from_json
