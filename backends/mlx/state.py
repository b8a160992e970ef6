"""The mutable buffers of programs, such as KV caches and counters."""

from __future__ import annotations

import ctypes

from .loader import load_delegate


def reset() -> None:
    """Reset the mutable buffers of the program whose method this thread calls next, before the method runs.

    All methods of the program that share these buffers then have the contents with which the program was loaded. A call
    that fails may leave the buffers undefined: the log says so, and later calls are refused until they are reset.
    """
    ctypes.CDLL(load_delegate()).executorch_mlx_reset()
