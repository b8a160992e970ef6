"""Installed binaries find the libraries of the executorch and mlx wheels beside the package, by relative paths."""

import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "test"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A separate site-packages folder: the package is installed, the wheels are links."""
    site = tmp_path_factory.mktemp("site-packages")
    command = [sys.executable, "-m", "cmake", "--install", ROOT / "build"]
    subprocess.run([*command, "--prefix", site / "executorch_mlx"], check=True, capture_output=True)
    wheels = Path(find_spec("executorch.runtime").origin).parents[2]
    for name in ("executorch", "mlx", "scipy_openblas32", *(folder.name for folder in wheels.glob("mlx*.libs"))):
        (site / name).symlink_to(wheels / name)
    return site


def binaries(site: Path) -> list[Path]:
    """The delegate, the LLM engine and the installed programs."""
    package = site / "executorch_mlx"
    shared = {file.stem: file for file in (*package.glob("lib/*.so"), *package.glob("lib/*.dylib"))}
    linux_only = {"libmlx_cpu_kernels", "libmlx_scale_search"} if platform.system() == "Linux" else set()
    assert shared.keys() == {"libmlx_delegate", "libmlx_llm_engine"} | linux_only
    return [shared["libmlx_delegate"], shared["libmlx_llm_engine"], *sorted(package.glob("bin/*"))]


def test_flatbuffers_include_folder_contains_nothing_else():
    """A folder such as /opt/homebrew/include may also contain the headers of another mlx."""
    copy = ROOT / "build" / "flatbuffers"
    if not copy.exists():
        pytest.skip("the build downloaded FlatBuffers")
    assert [path.name for path in copy.iterdir()] == ["flatbuffers"]
    commands = (ROOT / "build" / "compile_commands.json").read_text()
    assert f"-isystem {copy} " in commands
    assert "-isystem /usr/include " not in commands and "homebrew/include " not in commands


def test_only_user_programs_are_installed(site):
    programs = {file.name for file in (site / "executorch_mlx" / "bin").iterdir()}
    assert programs == {"mlx_llm_runner"}


@pytest.mark.skipif(platform.system() != "Linux", reason="reads ELF")
def test_library_search_paths_are_relative(site):
    for file in binaries(site):
        lines = subprocess.check_output(["readelf", "-d", file], text=True).splitlines()
        (runpath,) = (line for line in lines if "RUNPATH" in line or "RPATH" in line)
        paths = runpath.partition("[")[2].rstrip("]").split(":")
        assert {"$ORIGIN/../../executorch/lib", "$ORIGIN/../../mlx/lib"} <= set(paths)
        assert all(path.startswith("$ORIGIN") for path in paths), f"{file.name}: {paths}"


@pytest.mark.skipif(platform.system() != "Linux", reason="reads ELF")
def test_libraries_of_the_wheels_are_found(site):
    for file in binaries(site):
        found = subprocess.check_output(["ldd", file], text=True)
        assert "not found" not in found, found
        for library in ("libexecutorch.so", "libmlx.so"):
            (line,) = (line for line in found.splitlines() if line.split()[0] == library)
            assert str(site) in line


PRINT_BLAS_NAME = """
import ctypes, sys
sys.path.insert(0, sys.argv[3])
from kernel_library import KernelLibrary
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[2])
name = KernelLibrary(sys.argv[1]).blas_name
name.restype = ctypes.c_char_p
print(name().decode())
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="libmlx_cpu_kernels is built on Linux only")
@pytest.mark.parametrize("has_openblas, name", [(True, "OpenBLAS"), (False, "mlx")])
def test_openblas_is_found_beside_the_package(site, tmp_path, has_openblas, name):
    """Without OpenBLAS, products use the BLAS of the mlx wheel."""
    library = site / "executorch_mlx" / "lib" / "libmlx_cpu_kernels.so"
    if not has_openblas:
        library = shutil.copy(library, tmp_path)
    command = [sys.executable, "-c", PRINT_BLAS_NAME, library, site / "mlx" / "lib" / "libmlx.so", TESTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(name), done.stderr


def test_installed_runner_starts(site):
    """Called without arguments, the program reports that the argument MODEL is missing."""
    runner = site / "executorch_mlx" / "bin" / "mlx_llm_runner"
    done = subprocess.run([runner], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "MODEL" in done.stderr
