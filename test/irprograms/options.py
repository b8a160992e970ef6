"""Sets the defaults of load options for this process."""

import ctypes
from contextlib import contextmanager

from executorch_mlx.loader import load_delegate

DEFAULTS = {
    "device": "",
    "metal_kernels": "false",
    "kv_windows": "",
    "max_instructions": str(2**24),
    "max_operations": str(2**50),
}


def set_option(key: str, value: str) -> int:
    """Set the default of an option. Returns 0, or the number of an ExecuTorch Error."""
    call = ctypes.CDLL(load_delegate()).executorch_mlx_set_option
    call.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    return call(key.encode(), value.encode())


@contextmanager
def option(key: str, value: str):
    """Set an option for the programs loaded in the `with` block."""
    assert set_option(key, value) == 0
    try:
        yield
    finally:
        assert set_option(key, DEFAULTS[key]) == 0
