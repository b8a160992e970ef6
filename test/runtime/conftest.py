import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", params=["portable", "avx2", "avx512", "avx512_bf16", "amx"])
def library(request, delegate) -> ctypes.CDLL:
    """libmlx_blas with the kernels of one instruction set. The best set comes last and stays selected."""
    library = ctypes.CDLL(str(Path(delegate).parent / "libmlx_blas.so"))
    library.executorch_mlx_use_kernels.restype = ctypes.c_bool
    if not library.executorch_mlx_use_kernels(request.param.encode()):
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
