"""The library of the CPU kernels, for ctypes."""

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")  # the best one last


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


def select(library: KernelLibrary, instruction_set: str) -> bool:
    """Let the kernels use this instruction set, and return whether the processor supports it."""
    library.use_instruction_set.restype = ctypes.c_bool
    return library.use_instruction_set(instruction_set.encode())


def selected_sets(delegate: str) -> Iterator[str]:
    """Select one after the other the instruction sets that the processor supports, and yield their names."""
    if sys.platform == "linux":
        library = kernel_library(delegate)
        try:
            yield from (name for name in INSTRUCTION_SETS if select(library, name))
        finally:
            for name in INSTRUCTION_SETS:
                select(library, name)
