import ctypes
from collections.abc import Callable, Iterator

import pytest
from kernel_library import KernelLibrary, kernel_library


@pytest.fixture(scope="module", params=["portable", "avx2", "avx512", "avx512_bf16", "amx"])
def library(request, delegate) -> KernelLibrary:
    """The kernels of one instruction set. The best set comes last and stays selected."""
    library = kernel_library(delegate)
    library.use_instruction_set.restype = ctypes.c_bool
    if not library.use_instruction_set(request.param.encode()):
        pytest.skip(f"this processor does not support {request.param}")
    return library


@pytest.fixture
def limit(delegate) -> Iterator[Callable[[int], int]]:
    """A function: `limit(extra)` sets the memory limit to the active memory plus `extra` bytes, and returns the limit.

    It also resets the peak of the active memory.
    """
    from executorch_mlx import memory

    def set_limit(extra: int) -> int:
        memory.reset_peak_memory()
        total = memory.get_active_memory() + extra
        memory.set_memory_limit(total)
        return total

    yield set_limit
    memory.set_memory_limit(None)
