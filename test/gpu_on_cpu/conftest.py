import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

BUILD = Path(__file__).parents[2] / "build"


class Line(NamedTuple):
    """What the program prints for a kernel."""

    verdict: str
    is_used: bool
    error: float
    time: float
    reason: str


class Trials(NamedTuple):
    kernels: dict[str, Line]
    held: int


@pytest.fixture(scope="session")
def program() -> Path:
    """The program kernel_trials, built. One test process at a time builds it."""
    if sys.platform != "linux" or "EXECUTORCH_MLX_BUILD" in os.environ:
        pytest.skip("only the build in build/ on Linux has the program kernel_trials")
    cmake = [sys.executable, "-m", "cmake", "--build", BUILD, "--target", "kernel_trials"]
    with (BUILD / "kernel_trials.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(cmake, check=True, stdout=subprocess.DEVNULL)
    return BUILD / "kernel_trials"


@pytest.fixture(scope="session")
def hold(program, tmp_path_factory) -> Callable[..., Trials]:
    """A function that holds the trials of a platform, with options of the program kernel_trials."""
    folder = tmp_path_factory.mktemp("kernels")

    def hold(platform: str, *options: object) -> Trials:
        command = [program, platform, folder, *map(str, options)]
        *lines, held = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        kernels = {}
        for name, verdict, used, error, time, *reason in (line.split(" ", 5) for line in lines):
            kernels[name] = Line(verdict, used == "1", float(error), float(time), "".join(reason))
        return Trials(kernels, int(held.removeprefix("held ")))

    return hold
