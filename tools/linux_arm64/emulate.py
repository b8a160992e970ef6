"""Compiles the project for Linux on arm64, and writes commands that run its programs under QEMU.

    python tools/linux_arm64/emulate.py            # → build/linux_arm64/emulated/{mlx_llm_runner,op_test_runner}

The tests run them in the place of the programs in build/ if EXECUTORCH_MLX_TEST_PROGRAMS names this folder.
"""

import shutil
import sys
from pathlib import Path

import build_arm64_wheel

SYSTEM = Path("/usr/aarch64-linux-gnu")  # the libraries of Debian's cross compiler
PROGRAMS = ("mlx_llm_runner", "op_test_runner")


def missing_tool() -> str | None:
    """Return why this machine cannot run the programs, or None if it can."""
    if not shutil.which("qemu-aarch64"):
        return "qemu-aarch64 not found (Debian and Ubuntu: apt-get install qemu-user)"
    return build_arm64_wheel.missing_tool()


def command(program: Path, page_size: int = 4096) -> list[str]:
    """The command that runs a program with memory pages of this size in bytes."""
    return ["qemu-aarch64", "-p", str(page_size), "-L", str(SYSTEM), str(program)]


def write_commands(build: Path, out: Path) -> None:
    """Write a script for each program of the build to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        script = out / name
        script.write_text(f'#!/bin/sh\nexec {" ".join(command(build / name))} "$@"\n')
        script.chmod(0o755)


def main() -> None:
    if missing := missing_tool():
        sys.exit(f"[arm64] {missing}")
    out = build_arm64_wheel.ARM64.work / "emulated"
    try:
        write_commands(build_arm64_wheel.build(), out)
    except RuntimeError as error:
        sys.exit(f"[arm64] {error}")
    print(f"[arm64] {out}")


if __name__ == "__main__":
    main()
