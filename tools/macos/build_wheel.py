"""Builds the macOS wheel on Linux: compiles with zig's Clang, links with LLVM's ld64.lld.

    python tools/macos/build_wheel.py              # → dist/executorch_mlx-…-macosx_14_0_arm64.whl

Prints one line and builds nothing if the machine lacks ld64.lld or flatc. The steps, all below build/macos/:

1. pip downloads the macOS wheels of executorch and mlx, which contain headers and libraries.
2. stubs.py lists the symbols of macOS's system libraries, in the place of Apple's SDK.
3. CMake builds the project with toolchain.cmake.
4. setup.py makes a wheel of that build.
"""

import argparse
import fcntl
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import stubs  # noqa: E402
from wheels import move, run  # noqa: E402

WORK = ROOT / "build" / "macos"
SITE_PACKAGES = WORK / "site-packages"
STUBS = WORK / "stubs"
PLATFORM = "macosx_14_0_arm64"
ZIG = "ziglang==0.17.1"
OLDEST_LINKER, NEWEST_LINKER = 19, 30  # versions of LLVM; 19 is tested


def linker() -> str | None:
    """Return the path of ld64.lld, or None if there is none of a supported version.

    Debian installs the program with or without the version in its name.
    """
    for name in ("ld64.lld", *(f"ld64.lld-{version}" for version in range(NEWEST_LINKER, OLDEST_LINKER - 1, -1))):
        if path := shutil.which(name):
            version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            found = re.search(r"LLD (\d+)", version)
            if found and int(found[1]) >= OLDEST_LINKER:
                return path
    return None


def missing_tool() -> str | None:
    """Return a message about a tool that the build needs and this machine lacks, or None if all tools are there."""
    if not linker():
        return f"ld64.lld {OLDEST_LINKER} or newer not found (Debian and Ubuntu: apt-get install lld-19)"
    if not shutil.which("flatc"):
        return "flatc not found (Debian and Ubuntu: apt-get install libflatbuffers-dev flatbuffers-compiler)"
    return None


def build_wheel(out: Path) -> Path:
    """Build the wheel in the folder `out` and return its path. Later calls compile only what has changed since."""
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:  # parallel tests may call this at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        unpack_wheels()
        zig = zig_folder()
        STUBS.mkdir(exist_ok=True)
        stubs.write_libcxx(STUBS / "libc++.1.tbd", wheel_libraries())
        stubs.write_libsystem(STUBS / "libSystem.tbd", zig / "lib" / "libc" / "darwin" / "libSystem.tbd")
        compile_project(zig / "zig")
        return make_wheel(out)


def wheel_libraries() -> list[Path]:
    folders = (SITE_PACKAGES / "executorch" / "lib", SITE_PACKAGES / "mlx" / "lib")
    return sorted(file for folder in folders for file in folder.glob("*.dylib"))


def unpack_wheels() -> None:
    """Download the macOS wheels of executorch and mlx to `SITE_PACKAGES`, unless the pinned versions are there."""
    pins = dict(re.findall(r'"(executorch|mlx)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    requirements = [f"executorch=={pins['executorch']}", f"mlx-metal=={pins['mlx']}"]
    installed = WORK / "unpacked"  # a file with the versions in `SITE_PACKAGES`
    if installed.exists() and installed.read_text().split() == requirements:
        return
    say(f"downloading {' and '.join(requirements)} for macOS")
    downloads = WORK / "downloads"
    # The C++ libraries are the same in the wheels of all Python versions.
    pip(
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        downloads,
        "--platform",
        PLATFORM,
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        *requirements,
    )
    shutil.rmtree(SITE_PACKAGES, ignore_errors=True)
    for wheel in downloads.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(SITE_PACKAGES)
    shutil.rmtree(downloads)
    installed.write_text("\n".join(requirements))


def zig_folder() -> Path:
    """Return the folder of zig, which is downloaded if it is not there."""
    folder = WORK / "zig"
    if not (folder / "ziglang" / "zig").exists() or (folder / "version").read_text() != ZIG:
        say(f"downloading {ZIG}")
        shutil.rmtree(folder, ignore_errors=True)
        pip("install", "--no-deps", "--target", folder, ZIG)
        (folder / "version").write_text(ZIG)
    return folder / "ziglang"


def compile_project(zig: Path) -> None:
    say("compiling for macOS")
    options = {
        "CMAKE_TOOLCHAIN_FILE": HERE / "toolchain.cmake",
        "EXECUTORCH_MLX_TESTS": "OFF",
        "CMAKE_MAKE_PROGRAM": shutil.which("ninja", path=Path(sys.executable).parent) or shutil.which("ninja"),
        "EXECUTORCH_MLX_WHEELS": SITE_PACKAGES,
        "EXECUTORCH_MLX_ZIG": zig,
        "EXECUTORCH_MLX_LD64": linker(),
        "EXECUTORCH_MLX_STUBS": STUBS,
    }
    cmake = [sys.executable, "-m", "cmake"]
    defines = [f"-D{name}={value}" for name, value in options.items()]
    environment = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(WORK / "zig-cache"))
    # Without --fresh, CMake ignores changes of toolchain.cmake.
    run([*cmake, "--fresh", "-S", ROOT, "-B", WORK / "cmake", "-G", "Ninja", *defines], environment)
    run([*cmake, "--build", WORK / "cmake"], environment)


def make_wheel(out: Path) -> Path:
    """Make a wheel of the compiled project in the folder `out`, and return its path."""
    made = WORK / "packed"
    shutil.rmtree(made, ignore_errors=True)
    run(
        [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", WORK]
        + ["build", "--build-base", WORK / "setuptools"]
        + ["bdist_wheel", "--plat-name", PLATFORM, "--dist-dir", made],
        {"EXECUTORCH_MLX_CMAKE_BUILD": str(WORK / "cmake")},
    )
    (wheel,) = made.glob("*.whl")
    return move(wheel, out)


def pip(*arguments: object) -> None:
    run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def say(text: str) -> None:
    print(f"[wheels] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--has-linker", action="store_true", help="only look for ld64.lld; exit status 0 if found")
    if parser.parse_args().has_linker:
        sys.exit(linker() is None)
    if missing := missing_tool():
        say(f"no macOS wheel: {missing}")
        return
    try:
        say(f"built {build_wheel(ROOT / 'dist').relative_to(ROOT)}")
    except RuntimeError as error:
        sys.exit(f"[wheels] {error}")


if __name__ == "__main__":
    main()
