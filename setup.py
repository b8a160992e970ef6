"""Finds the packages and drives CMake; the rest of the distribution is in pyproject.toml.

A wheel gets what `cmake --install` lays down below executorch_mlx: the library in lib/, the runner in bin/.
An editable install leaves them in build/, where the next `cmake --build build` renews them.

EXECUTORCH_MLX_SKIP_CMAKE=1 installs the Python side alone; tools/setup.sh uses it to have the wheels
in place before the first compilation.
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


def cmake(*arguments: object) -> None:
    # `python -m cmake` is the one from PyPI: an older cmake on PATH does not get in its way.
    subprocess.run([sys.executable, "-m", "cmake", *map(str, arguments)], check=True)


class BuildPython(build_py):
    def run(self) -> None:
        if not self.editable_mode:  # a module deleted since the last build must not reach the wheel
            shutil.rmtree(Path(self.build_lib) / PACKAGE, ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    installed: list[str] = []

    def run(self) -> None:
        if os.environ.get("EXECUTORCH_MLX_SKIP_CMAKE") == "1":
            return
        import ninja

        in_place = self.editable_mode or self.inplace
        # A wheel may be built against other wheels than the tree's own (pip's isolation), hence a folder of its own.
        build = ROOT / "build" if in_place else Path(self.build_temp).resolve() / "cmake"
        cmake(
            *([] if in_place else ["--fresh"]),
            *("-S", ROOT, "-B", build, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
            f"-DPython_EXECUTABLE={sys.executable}",
        )
        cmake("--build", build)
        if not in_place:
            cmake("--install", build, "--prefix", Path(self.build_lib).resolve() / PACKAGE, "--strip")
            self.installed = (build / "install_manifest.txt").read_text().splitlines()

    def get_outputs(self) -> list[str]:
        return [os.path.relpath(file) for file in self.installed]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # The library speaks no Python ABI: one wheel serves every Python 3 of its platform.
        return "py3", "none", super().get_tag()[2]


setup(
    packages=[PACKAGE, *(f"{PACKAGE}.{name}" for name in find_packages(SOURCES))],
    ext_modules=[Extension(f"{PACKAGE}.mlx_delegate", sources=[])],
    cmdclass={"build_py": BuildPython, "build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    options={"build": {"build_base": "build/setuptools"}},  # build/ is CMake's
)
