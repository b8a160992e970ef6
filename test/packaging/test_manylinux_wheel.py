"""The Linux wheel that `make wheels` builds from build/: its tag, its files and where they look for libraries."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import wheels  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return wheels.manylinux_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def package(wheel, tmp_path_factory) -> Path:
    site = tmp_path_factory.mktemp("site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    return site / "executorch_mlx"


def test_tag_names_the_oldest_glibc_and_any_python(wheel):
    found = re.fullmatch(r"executorch_mlx-[\d.]+-py3-none-manylinux_2_(\d+)_(?:x86_64|aarch64)\.whl", wheel.name)
    assert found, wheel.name
    _, minor = subprocess.check_output(["getconf", "GNU_LIBC_VERSION"], text=True).split()[1].split(".")
    assert int(found[1]) <= int(minor)


def test_wheel_contains_our_libraries_and_no_others(package):
    libraries = {file.name for file in package.parent.rglob("*.so*")}
    names = ("cpu_kernels", "delegate", "llm_engine", "scale_search")
    assert libraries == {f"libmlx_{name}.so" for name in names}
    assert {file.name for file in (package / "bin").iterdir()} == {"mlx_llm_runner"}
    members = {folder.name for folder in package.parent.iterdir()}
    assert not any(name.endswith(".libs") for name in members), "auditwheel copied libraries"


@pytest.mark.parametrize(
    "name", ["lib/libmlx_delegate.so", "lib/libmlx_llm_engine.so", "lib/libmlx_cpu_kernels.so", "bin/mlx_llm_runner"]
)
def test_library_search_paths_are_relative(package, name):
    lines = subprocess.check_output(["readelf", "-d", package / name], text=True).splitlines()
    (runpath,) = (line for line in lines if "RUNPATH" in line or "RPATH" in line)
    paths = runpath.partition("[")[2].rstrip("]").split(":")
    assert all(path.startswith("$ORIGIN") for path in paths), paths
