"""What pip is told about the package agrees with what is in the tree."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "backends" / "mlx"
PINS = {"torch": "2.13.0", "executorch": "1.5.1", "mlx": "0.32.4"}


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> tuple[Path, importlib.metadata.Distribution]:
    """What setuptools would ship: the Python side of build_py, and the metadata."""
    out = tmp_path_factory.mktemp("build")
    command = [sys.executable, "setup.py", "--quiet"]
    command += ["egg_info", "--egg-base", out, "build_py", "--build-lib", out / "lib"]
    subprocess.run(command, cwd=ROOT, check=True)
    return out / "lib", importlib.metadata.Distribution.at(out / "executorch_mlx.egg-info")


def test_every_python_file_is_packaged_and_nothing_else(build):
    lib, _ = build
    ours = {file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")}
    shipped = {file.relative_to(lib / "executorch_mlx") for file in lib.rglob("*.*")}
    assert shipped == ours | {Path("serialization/schema.fbs"), Path("serve/page.html")}


def test_metadata(build):
    _, metadata = build
    assert metadata.name == "executorch-mlx"
    assert metadata.metadata["License-Expression"] == "BSD-3-Clause"
    extras = set(metadata.metadata.get_all("Provides-Extra"))
    assert extras >= {"cpu", "cuda12", "cuda13", "llm", "serve", "dev"}


def test_the_pins_are_what_is_installed(build):
    _, metadata = build
    required = [Requirement(line) for line in metadata.requires]
    pins = {r.name: r for r in required if r.name in PINS and r.marker is None}
    assert {name: str(r.specifier) for name, r in pins.items()} == {k: f"=={v}" for k, v in PINS.items()}
    for name, requirement in pins.items():
        installed = importlib.metadata.version(name)
        assert requirement.specifier.contains(Version(installed)), f"{name} {installed} is installed"


def test_the_installed_distribution_is_this_tree(build):
    try:
        installed = importlib.metadata.version("executorch-mlx")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("executorch-mlx is not installed here: make build installs it")
    assert installed == build[1].version
    origin = importlib.util.find_spec("executorch_mlx").origin
    assert Path(origin) == PACKAGE / "__init__.py"
