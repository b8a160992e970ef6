from collections.abc import Callable, Iterator

import pytest
from kernel_library import INSTRUCTION_SETS, KernelLibrary, kernel_library, select


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def library(request, delegate) -> KernelLibrary:
    """The kernels of one instruction set. The best set comes last and stays selected."""
    library = kernel_library(delegate)
    if not select(library, request.param):
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
