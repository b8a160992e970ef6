"""The metadata that pip reads agrees with the source tree and with the installed wheels."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "backends" / "mlx"
PINS = {"torch": "2.13.0", "executorch": "1.5.1", "mlx": "0.32.4"}
OLDEST_PYTHON, NEWEST_PYTHON = "3.11", "3.14"


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> tuple[Path, importlib.metadata.Distribution]:
    """The folder with the Python files of a wheel, and the metadata of the wheel."""
    out = tmp_path_factory.mktemp("build")
    command = [sys.executable, "setup.py", "--quiet"]
    command += ["egg_info", "--egg-base", out, "build_py", "--build-lib", out / "lib"]
    subprocess.run(command, cwd=ROOT, check=True)
    return out / "lib", importlib.metadata.Distribution.at(out / "executorch_mlx.egg-info")


@pytest.fixture(scope="module")
def requirements(build) -> list[Requirement]:
    return [Requirement(line) for line in build[1].requires]


def test_wheel_contains_all_python_and_data_files(build):
    lib, _ = build
    sources = {file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")}
    packaged = {file.relative_to(lib / "executorch_mlx") for file in lib.rglob("*.*")}
    page = {file.relative_to(PACKAGE) for file in (PACKAGE / "serve" / "page").rglob("*.*")}
    assert Path("serve/page/vendor/marked.LICENSE") in page
    assert packaged == sources | page | {Path("serialization/schema.fbs")}


def test_name_license_and_extras(build):
    _, metadata = build
    assert metadata.name == "executorch-mlx"
    assert metadata.metadata["License-Expression"] == "BSD-3-Clause"
    extras = set(metadata.metadata.get_all("Provides-Extra"))
    assert extras == {"cpu", "cuda12", "cuda13", "export", "serve", "speech", "ray", "vision"}


def test_console_scripts_are_functions_of_the_package(build):
    scripts = {script.name: script for script in build[1].entry_points.select(group="console_scripts")}
    assert scripts.keys() == {"executorch-mlx", "mlx_llm_runner"}
    for script in scripts.values():
        assert callable(script.load())


def test_pinned_versions_are_installed(requirements):
    pins = {r.name: r for r in requirements if r.name in PINS and not r.extras}
    assert {name: str(r.specifier) for name, r in pins.items()} == {k: f"=={v}" for k, v in PINS.items()}
    for name, requirement in pins.items():
        installed = importlib.metadata.version(name)
        assert requirement.specifier.contains(Version(installed)), f"{name} {installed} is installed"


def test_pinned_versions_support_every_python_of_the_package(build, requirements):
    supported = SpecifierSet(build[1].metadata["Requires-Python"])
    assert supported == SpecifierSet(f">={OLDEST_PYTHON},<3.15")
    pinned = {r.name for r in requirements if str(r.specifier).startswith("==")}
    assert pinned >= PINS.keys()
    for name in pinned:
        requires_python = SpecifierSet(importlib.metadata.metadata(name)["Requires-Python"])
        for python in (OLDEST_PYTHON, NEWEST_PYTHON):
            assert requires_python.contains(f"{python}.0"), f"{name} requires Python {requires_python}"


def test_setup_script_accepts_the_python_versions_of_the_package():
    script = (ROOT / "tools" / "setup.sh").read_text()
    assert "(3, 11) <= sys.version_info < (3, 15)" in script
    assert set(re.findall(r"expected (3\.\d+) to (3\.\d+)", script)) == {(OLDEST_PYTHON, NEWEST_PYTHON)}


def test_build_files_name_the_same_macos_version():
    """The native build on a Mac and the cross build on Linux make the same wheel."""
    for file, text in {
        "setup.py": 'MACOS_TAG = "macosx_14_0_arm64"',
        "tools/macos/build_wheel.py": 'PLATFORM = "macosx_14_0_arm64"',
        "tools/macos/toolchain.cmake": "aarch64-macos.14.0",
        "tools/macos/link_rules.cmake": "-arch arm64 -platform_version macos 14.0 ",
    }.items():
        assert text in (ROOT / file).read_text(), file
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert "CMAKE_OSX_DEPLOYMENT_TARGET 14.0 " in cmake and "CMAKE_OSX_ARCHITECTURES arm64 " in cmake


def test_installed_distribution_is_this_source_tree(build):
    try:
        installed = importlib.metadata.version("executorch-mlx")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("executorch-mlx is not installed: make build installs it")
    assert installed == build[1].version
    origin = importlib.util.find_spec("executorch_mlx").origin
    assert Path(origin).resolve() == PACKAGE / "__init__.py"


def test_running_requires_no_torch(requirements):
    """Nor does ExecuTorch's wheel require it."""
    needed = {r.name for r in requirements if r.marker is None}
    assert needed >= {"executorch", "mlx", "tokenizers"} and not needed & {"torch", "transformers"}
    others = map(Requirement, importlib.metadata.requires("executorch"))
    assert "torch" not in {r.name for r in others if r.marker is None or "extra" not in str(r.marker)}


def test_running_and_serving_import_neither_torch_nor_transformers(chat_program):
    script = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
from executorch_mlx import LLM
from executorch_mlx.cli.main import main
from executorch_mlx.serve import create_app
from starlette.testclient import TestClient
assert main(["run", sys.argv[1], "--prompt", "Return", "--max-new-tokens", "2"]) == 0
import executorch_mlx.batch, executorch_mlx.cli.batch, executorch_mlx.cli.serve, executorch_mlx.speech
with LLM.load(sys.argv[1]) as llm, TestClient(create_app(llm, name="m"), base_url="http://127.0.0.1") as client:
    body = {"model": "m", "messages": [{"role": "user", "content": "Return"}], "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 2, answer.text
"""
    command = [sys.executable, "-c", script, str(chat_program)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
