"""Lists the packages and runs CMake. pyproject.toml describes everything else of the distribution.

A wheel contains the files that `cmake --install` writes below executorch_mlx: libraries in lib/, programs in bin/.
An editable install uses the libraries in build/, which `cmake --build build` updates.

Two environment variables serve the scripts in tools/. EXECUTORCH_MLX_SKIP_CMAKE=1 skips the C++ build; tools/setup.sh
needs this, because it installs the package before the first build. EXECUTORCH_MLX_CMAKE_BUILD=<folder> makes a wheel of
the existing build in that folder.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = "executorch_mlx"
SOURCES = "backends/mlx"
MACOS_TAG = "macosx_14_0_arm64"  # the deployment target and the architecture in CMakeLists.txt


def cmake(*arguments: object) -> None:
    # `python -m cmake` runs the cmake from PyPI, even if PATH has an older one.
    subprocess.run([sys.executable, "-m", "cmake", *map(str, arguments)], check=True)


class BuildPython(build_py):
    def run(self) -> None:
        # The C++ build checks the schema with flatc, and writes the file again when the schema changes.
        subprocess.run([sys.executable, ROOT / SOURCES / "serialization/generate.py", "--no-flatc"], check=True)
        if not self.editable_mode:  # keeps modules that were deleted since the last build out of the wheel
            shutil.rmtree(Path(self.build_lib) / PACKAGE, ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    installed: list[str] = []

    def run(self) -> None:
        if os.environ.get("EXECUTORCH_MLX_SKIP_CMAKE") == "1":
            return
        if existing := os.environ.get("EXECUTORCH_MLX_CMAKE_BUILD"):
            self.install(Path(existing))
            return
        import ninja

        in_place = self.editable_mode or self.inplace
        # A wheel gets a build folder of its own: pip may build it in an isolated environment, where the dependencies
        # may have other versions than those of build/.
        build = ROOT / "build" if in_place else Path(self.build_temp).resolve() / "cmake"
        cmake(
            *([] if in_place else ["--fresh"]),
            *("-S", ROOT, "-B", build, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DEXECUTORCH_MLX_TESTS={'ON' if in_place else 'OFF'}",
        )
        cmake("--build", build)
        if not in_place:
            self.install(build)

    def install(self, build: Path) -> None:
        cmake("--install", build, "--prefix", Path(self.build_lib).resolve() / PACKAGE, "--strip")
        self.installed = (build / "install_manifest.txt").read_text().splitlines()

    def get_outputs(self) -> list[str]:
        return [os.path.relpath(file) for file in self.installed]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # The library does not use the Python ABI: one wheel serves every Python 3 of its platform.
        # On macOS, Python's own platform may be universal2, or older than CMakeLists.txt allows.
        return "py3", "none", MACOS_TAG if sys.platform == "darwin" else super().get_tag()[2]


setup(
    packages=[PACKAGE, *(f"{PACKAGE}.{name}" for name in find_packages(SOURCES))],
    ext_modules=[Extension(f"{PACKAGE}.mlx_delegate", sources=[])],
    cmdclass={"build_py": BuildPython, "build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    options={"build": {"build_base": "build/setuptools"}},  # build/ belongs to CMake
)
