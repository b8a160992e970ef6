import ctypes
from pathlib import Path

import pytest


@pytest.fixture(scope="module", params=["portable", "avx2", "avx512"])
def library(request, delegate) -> ctypes.CDLL:
    """libmlx_blas with the kernels of one instruction set. The best set comes last and stays selected."""
    library = ctypes.CDLL(str(Path(delegate).parent / "libmlx_blas.so"))
    library.executorch_mlx_use_kernels.restype = ctypes.c_bool
    if not library.executorch_mlx_use_kernels(request.param.encode()):
        pytest.skip(f"this processor does not support {request.param}")
    return library
