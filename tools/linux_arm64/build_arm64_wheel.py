"""Builds the wheel for Linux on arm64 on another Linux machine, with Debian's cross compiler.

    python tools/linux_arm64/build_arm64_wheel.py        # → dist/executorch_mlx-…-manylinux_2_35_aarch64.whl

Prints one line and builds nothing if the machine lacks the compiler or flatc, or is itself an arm64 machine, on which
`make wheels` packs the native build. ../cross.py describes the steps.
"""

import platform
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from cross import CrossBuild, say  # noqa: E402
from wheels import move, with_manylinux_tag  # noqa: E402

COMPILER = "aarch64-linux-gnu-g++"
# Those of executorch and of mlx, for the oldest glibc that each of them supports.
ARM64 = CrossBuild("linux_arm64", "Linux on arm64", "mlx-cpu", ("manylinux_2_28_aarch64", "manylinux_2_35_aarch64"))


def missing_tool() -> str | None:
    """Return why this machine cannot build the wheel, or None if it can."""
    if platform.machine() == "aarch64":
        return "this is an arm64 machine, which builds natively"
    if not shutil.which(COMPILER):
        return f"{COMPILER} not found (Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu)"
    if not shutil.which("flatc"):
        return "flatc not found (Debian and Ubuntu: apt-get install libflatbuffers-dev flatbuffers-compiler)"
    return None


def build(*targets: str) -> Path:
    """Compile the targets, or everything, and return the build folder. Later calls compile only what has changed."""
    with ARM64.locked():
        ARM64.unpack_wheels()
        ARM64.compile({}, None, *targets)
        return ARM64.build


def build_wheel(out: Path) -> Path:
    """Build the wheel in the folder `out` and return its path."""
    build()
    with ARM64.locked():
        return move(with_manylinux_tag(ARM64.make_wheel("linux_aarch64"), ARM64.work / "manylinux"), out)


def main() -> None:
    if missing := missing_tool():
        say(f"no wheel for Linux on arm64: {missing}")
        return
    try:
        say(f"built {build_wheel(ROOT / 'dist').relative_to(ROOT)}")
    except RuntimeError as error:
        sys.exit(f"[wheels] {error}")


if __name__ == "__main__":
    main()
