"""The delegate's options, as a process without load options of its own sets them."""

import ctypes
from contextlib import contextmanager

from executorch_mlx._load import load_delegate

DEFAULTS = {"device": "", "metal_kernels": "false", "kv_windows": ""}


def set_option(key: str, value: str) -> int:
    """0, or the number of an ExecuTorch Error."""
    call = ctypes.CDLL(load_delegate()).executorch_mlx_set_option
    call.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    return call(key.encode(), value.encode())


@contextmanager
def option(key: str, value: str):
    """For what is loaded inside."""
    assert set_option(key, value) == 0
    try:
        yield
    finally:
        assert set_option(key, DEFAULTS[key]) == 0
