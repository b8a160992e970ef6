"""The memory of MLX arrays in this process, and its limit.

The names are those of `mlx.core`. The numbers are bytes. They count everything that MLX has allocated, also for the
arrays that you make with `mlx.core`, and the weights that programs use in place: on a CPU, the constants of a loaded
program stay in the memory of its file. `mlx.core.get_active_memory()` does not count the latter.

All functions may be called from any thread. The first call loads the delegate, see `load_delegate`.
"""

from __future__ import annotations

import ctypes
import operator
import re
from functools import cache

from .loader import load_delegate

__all__ = [
    "OutOfMemoryError",
    "clear_cache",
    "get_active_memory",
    "get_cache_memory",
    "get_memory_limit",
    "get_peak_memory",
    "reset_peak_memory",
    "set_cache_limit",
    "set_memory_limit",
    "set_wired_limit",
]

_NO_LIMIT = 2 ** (8 * ctypes.sizeof(ctypes.c_size_t)) - 1  # EXECUTORCH_MLX_NO_MEMORY_LIMIT in memory.h
_ALLOCATION_FAILED = 0x21  # ExecuTorch's Error::MemoryAllocationFailed


class OutOfMemoryError(RuntimeError):
    """A load or a call that did not fit into the memory limit, or into the machine's memory."""


def get_active_memory() -> int:
    """Return the bytes in use."""
    return _library().executorch_mlx_get_active_memory()


def get_peak_memory() -> int:
    """Return the most bytes in use since the start of the process, or since `reset_peak_memory`.

    If programs were unloaded meanwhile, this is an upper bound.
    """
    return _library().executorch_mlx_get_peak_memory()


def reset_peak_memory() -> None:
    """Start to measure the peak anew."""
    _library().executorch_mlx_reset_peak_memory()


def get_cache_memory() -> int:
    """Return the bytes of freed memory that MLX keeps for later arrays. They are not active."""
    return _library().executorch_mlx_get_cache_memory()


def clear_cache() -> None:
    """Return the freed memory that MLX keeps to the system."""
    _library().executorch_mlx_clear_cache()


def set_cache_limit(limit: int) -> int:
    """Set how many freed bytes MLX may keep, and return the previous number.

    Args:
        limit: Bytes, 0 or more. 0 turns the cache off.

    Raises:
        ValueError: `limit` is negative or too large.
    """
    return _library().executorch_mlx_set_cache_limit(_size("set_cache_limit", limit, 0))


def get_memory_limit() -> int | None:
    """Return the limit in bytes, or None."""
    return _limit(_library().executorch_mlx_get_memory_limit())


def set_memory_limit(limit: int | None) -> int | None:
    """Set how many bytes may be in use, and return the previous limit.

    Unlike `mlx.core.set_memory_limit`, which is a guideline, this limit is kept. Loading a method, or executing one,
    that would pass it fails with ExecuTorch's `MemoryAllocationFailed`, which is a RuntimeError in Python, and a line
    in the log with the sizes; `LLM` raises `OutOfMemoryError`. The mutable buffers of the program, such as KV caches,
    keep the values that they had before the call. Call it again after raising the limit, or with smaller inputs.

    A call is checked before it computes anything. The check counts the results of all operations, but not the work
    space inside an operation or what other code allocates with MLX meanwhile. A call that fits only if it frees results
    on the way waits for the device several times.

    MLX's own limit, which its cache heeds, follows this one until it is removed.

    Args:
        limit: Bytes, 1 or more. None removes the limit, which is the default.

    Raises:
        ValueError: `limit` is not positive, or too large.
    """
    size = _NO_LIMIT if limit is None else _size("set_memory_limit", limit, 1)
    return _limit(_library().executorch_mlx_set_memory_limit(size))


def set_wired_limit(limit: int) -> int:
    """Set how many bytes stay resident for an Apple GPU, and return the previous number.

    This takes macOS 15 or later. On other devices it has no effect and returns 0.

    Args:
        limit: Bytes, 0 or more.

    Raises:
        ValueError: `limit` is negative, or more than the system permits.
    """
    previous = ctypes.c_size_t()
    size = _size("set_wired_limit", limit, 0)
    if _library().executorch_mlx_set_wired_limit(size, ctypes.byref(previous)) != 0:
        raise ValueError(f"set_wired_limit: got {limit}, which is more than the system permits")
    return previous.value


def out_of_memory(error: RuntimeError) -> OutOfMemoryError | None:
    """Return the error to raise for a failure of ExecuTorch on this thread, or None if it is of another kind."""
    if not re.search(rf"\b0x:?{_ALLOCATION_FAILED:x}\b", str(error)):
        return None
    return OutOfMemoryError(_library().executorch_mlx_memory_error().decode() or str(error))


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(load_delegate())
    size, nothing = ctypes.c_size_t, None
    for name, result, arguments in [
        ("get_active_memory", size, []),
        ("get_peak_memory", size, []),
        ("reset_peak_memory", nothing, []),
        ("get_cache_memory", size, []),
        ("clear_cache", nothing, []),
        ("set_cache_limit", size, [size]),
        ("get_memory_limit", size, []),
        ("set_memory_limit", size, [size]),
        ("set_wired_limit", ctypes.c_int, [size, ctypes.POINTER(size)]),
        ("memory_error", ctypes.c_char_p, []),
    ]:
        function = getattr(library, f"executorch_mlx_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _limit(size: int) -> int | None:
    return None if size == _NO_LIMIT else size


def _size(function: str, limit: int, lowest: int) -> int:
    size = operator.index(limit)
    if not lowest <= size < _NO_LIMIT:
        raise ValueError(f"{function}: got {limit}, expected {lowest} to {_NO_LIMIT - 1} bytes")
    return size
