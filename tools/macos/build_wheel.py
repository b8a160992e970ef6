"""Builds the macOS wheel on Linux: compiles with zig's Clang, links with LLVM's ld64.lld.

    python tools/macos/build_wheel.py              # → dist/executorch_mlx-…-macosx_14_0_arm64.whl

Prints one line and builds nothing if the machine lacks ld64.lld or flatc. Two steps are for macOS only; ../cross.py
describes the others:

1. pip downloads zig.
2. stubs.py lists the symbols of macOS's system libraries, in the place of Apple's SDK.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import stubs  # noqa: E402
from cross import CrossBuild, pip, say  # noqa: E402
from wheels import move  # noqa: E402

PLATFORM = "macosx_14_0_arm64"
MACOS = CrossBuild("macos", "macOS", "mlx-metal", (PLATFORM,))
WORK = MACOS.work
SITE_PACKAGES = MACOS.site_packages
STUBS = WORK / "stubs"
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
    with MACOS.locked():
        MACOS.unpack_wheels()
        zig = zig_folder()
        STUBS.mkdir(exist_ok=True)
        stubs.write_libcxx(STUBS / "libc++.1.tbd", wheel_libraries())
        stubs.write_libsystem(STUBS / "libSystem.tbd", zig / "lib" / "libc" / "darwin" / "libSystem.tbd")
        options = {
            "EXECUTORCH_MLX_TESTS": "OFF",
            "EXECUTORCH_MLX_ZIG": zig / "zig",
            "EXECUTORCH_MLX_LD64": linker(),
            "EXECUTORCH_MLX_STUBS": STUBS,
        }
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(WORK / "zig-cache"))
        MACOS.compile(options, caches)
        return move(MACOS.make_wheel(PLATFORM), out)


def wheel_libraries() -> list[Path]:
    folders = (SITE_PACKAGES / "executorch" / "lib", SITE_PACKAGES / "mlx" / "lib")
    return sorted(file for folder in folders for file in folder.glob("*.dylib"))


def zig_folder() -> Path:
    """Return the folder of zig, which is downloaded if it is not there."""
    folder = WORK / "zig"
    if not (folder / "ziglang" / "zig").exists() or (folder / "version").read_text() != ZIG:
        say(f"downloading {ZIG}")
        shutil.rmtree(folder, ignore_errors=True)
        pip("install", "--no-deps", "--target", folder, ZIG)
        (folder / "version").write_text(ZIG)
    return folder / "ziglang"


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
