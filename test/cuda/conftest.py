import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build"


@pytest.fixture(scope="session")
def cuda_kernel_sources() -> Path:
    """The program of this name, built. One test process at a time builds it."""
    cmake = [sys.executable, "-m", "cmake", "--build", BUILD, "--target", "cuda_kernel_sources"]
    with (BUILD / "cuda_kernel_sources.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(cmake, check=True, stdout=subprocess.DEVNULL)
    return BUILD / "cuda_kernel_sources"
