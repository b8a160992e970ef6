"""What `cmake --install` puts into the package finds the wheels beside it, and nothing of this machine."""

import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A site-packages of its own: our package installed, the wheels linked in."""
    site = tmp_path_factory.mktemp("site-packages")
    command = [sys.executable, "-m", "cmake", "--install", ROOT / "build"]
    subprocess.run([*command, "--prefix", site / "executorch_mlx"], check=True, capture_output=True)
    wheels = Path(find_spec("executorch.runtime").origin).parents[2]
    for name in ("executorch", "mlx", "scipy_openblas32", *(folder.name for folder in wheels.glob("mlx*.libs"))):
        (site / name).symlink_to(wheels / name)
    return site


def binaries(site: Path) -> list[Path]:
    """The delegate and the programs."""
    package = site / "executorch_mlx"
    shared = {file.stem: file for file in (*package.glob("lib/*.so"), *package.glob("lib/*.dylib"))}
    linux = {"libmlx_blas"} if platform.system() == "Linux" else set()
    assert shared.keys() == {"libmlx_delegate"} | linux
    return [shared["libmlx_delegate"], *sorted(package.glob("bin/*"))]


def test_programs_are_the_users(site):
    programs = {file.name for file in (site / "executorch_mlx" / "bin").iterdir()}
    assert programs == {"mlx_llm_runner"}


@pytest.mark.skipif(platform.system() != "Linux", reason="reads ELF")
def test_search_paths_are_relative(site):
    for file in binaries(site):
        lines = subprocess.check_output(["readelf", "-d", file], text=True).splitlines()
        (runpath,) = (line for line in lines if "RUNPATH" in line or "RPATH" in line)
        paths = runpath.partition("[")[2].rstrip("]").split(":")
        assert {"$ORIGIN/../../executorch/lib", "$ORIGIN/../../mlx/lib"} <= set(paths)
        assert all(path.startswith("$ORIGIN") for path in paths), f"{file.name}: {paths}"


@pytest.mark.skipif(platform.system() != "Linux", reason="reads ELF")
def test_libraries_are_the_neighbours(site):
    for file in binaries(site):
        found = subprocess.check_output(["ldd", file], text=True)
        assert "not found" not in found, found
        for library in ("libexecutorch.so", "libmlx.so"):
            (line,) = (line for line in found.splitlines() if line.split()[0] == library)
            assert str(site) in line


BLAS_OF_A_PROCESS = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[2])
name = ctypes.CDLL(sys.argv[1]).executorch_mlx_blas_name
name.restype = ctypes.c_char_p
print(name().decode())
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="MLX has Accelerate elsewhere")
@pytest.mark.parametrize("neighbours, name", [(True, "OpenBLAS"), (False, "mlx")])
def test_openblas_is_the_neighbour(site, tmp_path, neighbours, name):
    """Where it is absent, products go on to what MLX brings."""
    library = site / "executorch_mlx" / "lib" / "libmlx_blas.so"
    if not neighbours:
        library = shutil.copy(library, tmp_path)
    command = [sys.executable, "-c", BLAS_OF_A_PROCESS, library, site / "mlx" / "lib" / "libmlx.so"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(name), done.stderr


def test_the_runner_starts(site):
    """Far enough to see that it was given no model."""
    runner = site / "executorch_mlx" / "bin" / "mlx_llm_runner"
    done = subprocess.run([runner], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "MODEL" in done.stderr
