"""What the builds for other platforms have in common: macos/build_wheel.py and linux_arm64/build_arm64_wheel.py.

A build unpacks the wheels of executorch and mlx for its platform, which contain headers and libraries, compiles the
project with a toolchain file, and makes a wheel. All its files are below build/<name>/.
"""

import fcntl
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wheels import BUILD, ROOT, run


@dataclass(frozen=True)
class CrossBuild:
    """A build for another platform than this machine."""

    name: str  # of the folder in build/, and of that with toolchain.cmake in tools/
    title: str  # for people
    mlx_backend: str  # the package with libmlx
    wheel_platforms: tuple[str, ...]  # those of the wheels of executorch and mlx, as pip names them

    @property
    def work(self) -> Path:
        return BUILD / self.name

    @property
    def site_packages(self) -> Path:
        """The folder with the unpacked wheels of executorch and mlx."""
        return self.work / "site-packages"

    @property
    def build(self) -> Path:
        """The folder of CMake."""
        return self.work / "cmake"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for other builds in this folder: parallel tests may start several."""
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def unpack_wheels(self) -> None:
        """Download the wheels of executorch and mlx to `site_packages`, unless the pinned versions are there."""
        pins = dict(re.findall(r'"(executorch|mlx)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
        requirements = [f"executorch=={pins['executorch']}", f"{self.mlx_backend}=={pins['mlx']}"]
        installed = self.work / "unpacked"  # a file with the versions in `site_packages`
        if installed.exists() and installed.read_text().split() == requirements:
            return
        say(f"downloading {' and '.join(requirements)} for {self.title}")
        downloads = self.work / "downloads"
        # The C++ libraries are the same in the wheels of all Python versions.
        options = ["--no-deps", "--only-binary=:all:", "--dest", downloads, "--python-version", "3.12"]
        platforms = [part for name in self.wheel_platforms for part in ("--platform", name)]
        pip("download", *options, "--implementation", "cp", *platforms, *requirements)
        shutil.rmtree(self.site_packages, ignore_errors=True)
        for wheel in downloads.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(self.site_packages)
        shutil.rmtree(downloads)
        installed.write_text("\n".join(requirements))

    def compile(self, options: dict[str, object], environment: dict[str, str] | None = None, *targets: str) -> None:
        """Configure the project with more options of CMake, and build the targets, or all: what has changed."""
        say(f"compiling for {self.title}")
        options = {
            "CMAKE_TOOLCHAIN_FILE": ROOT / "tools" / self.name / "toolchain.cmake",
            "CMAKE_MAKE_PROGRAM": shutil.which("ninja", path=Path(sys.executable).parent) or shutil.which("ninja"),
            "EXECUTORCH_MLX_WHEELS": self.site_packages,
            **options,
        }
        cmake = [sys.executable, "-m", "cmake"]
        defines = [f"-D{name}={value}" for name, value in options.items()]
        # Without --fresh, CMake ignores changes of toolchain.cmake.
        run([*cmake, "--fresh", "-S", ROOT, "-B", self.build, "-G", "Ninja", *defines], environment)
        run([*cmake, "--build", self.build, *(["--target", *targets] if targets else [])], environment)

    def make_wheel(self, tag: str) -> Path:
        """Make a wheel of the compiled project with this platform tag, and return its path in build/."""
        made = self.work / "packed"
        shutil.rmtree(made, ignore_errors=True)
        run(
            [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", self.work]
            + ["build", "--build-base", self.work / "setuptools"]
            + ["bdist_wheel", "--plat-name", tag, "--dist-dir", made],
            {"EXECUTORCH_MLX_CMAKE_BUILD": str(self.build)},
        )
        (wheel,) = made.glob("*.whl")
        return wheel


def pip(*arguments: object) -> None:
    run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def say(text: str) -> None:
    print(f"[wheels] {text}", flush=True)
