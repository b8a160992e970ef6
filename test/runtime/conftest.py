import ctypes
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", params=["portable", "avx2", "avx512"])
def library(request) -> ctypes.CDLL:
    """Our BLAS with the kernels of every instruction set; the best one, which is last, stays."""
    from executorch_mlx import load_delegate

    library = ctypes.CDLL(str(Path(load_delegate()).parent / "libmlx_blas.so"))
    library.executorch_mlx_use_kernels.restype = ctypes.c_bool
    if not library.executorch_mlx_use_kernels(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    return library
