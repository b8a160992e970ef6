"""The library of the CPU kernels, for ctypes."""

import ctypes
import re
import subprocess
from pathlib import Path


class KernelLibrary(ctypes.CDLL):
    """Finds a C++ function of the namespace `executorch_mlx::kernel` by its name alone.

    A function that takes a reference gets a pointer.
    """

    def __init__(self, path: Path | str):
        super().__init__(str(path))
        symbols = subprocess.check_output(["nm", "--dynamic", "--defined-only", str(path)], text=True)
        found = re.findall(r" T (_ZN14executorch_mlx6kernel(\d+)(\w+))", symbols)
        self._symbols = {rest[: int(length)]: symbol for symbol, length, rest in found}

    def __getattr__(self, name: str):
        function = self[self._symbols.get(name, name)]
        setattr(self, name, function)
        return function


def kernel_library(delegate: str) -> KernelLibrary:
    """The library that the delegate uses."""
    return KernelLibrary(Path(delegate).parent / "libmlx_cpu_kernels.so")
