"""The memory of MLX arrays in this process, and its limit.

The functions have the names that they have in `mlx.core`. All sizes are in bytes. They count the memory that MLX has
allocated, including that of arrays that you create with `mlx.core`, and the weights that programs use in place: on a
CPU, the constants of a loaded program stay in the memory of its file, except that packed copies of quantized weights
take their place. `mlx.core.get_active_memory()` does not count weights in place.

All functions may be called from any thread. The first call of one of them loads the delegate, see `load_delegate`.
"""

from __future__ import annotations

import ctypes
import operator
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


class OutOfMemoryError(RuntimeError):
    """Raised by `LLM` if a load or a call does not fit into the memory limit, or into the memory of the machine."""


def get_active_memory() -> int:
    """Return the number of bytes in use."""
    return _library().executorch_mlx_get_active_memory()


def get_peak_memory() -> int:
    """Return the largest number of bytes in use since the start of the process, or since `reset_peak_memory`.

    If a program was unloaded in that time, or a method was loaded whose packed weights take the place of those of an
    earlier method, the result may be higher than the true peak.
    """
    return _library().executorch_mlx_get_peak_memory()


def reset_peak_memory() -> None:
    """Set the peak to the number of bytes in use now."""
    _library().executorch_mlx_reset_peak_memory()


def get_cache_memory() -> int:
    """Return the number of freed bytes that MLX keeps for later arrays. They do not count as active memory."""
    return _library().executorch_mlx_get_cache_memory()


def clear_cache() -> None:
    """Give the freed memory that MLX keeps for later arrays back to the system."""
    _library().executorch_mlx_clear_cache()


def set_cache_limit(limit: int) -> int:
    """Set how many freed bytes MLX may keep, and return the previous number.

    Args:
        limit: Bytes, 0 or more. 0 turns the cache off.

    Raises:
        ValueError: `limit` is negative or too large.
    """
    return _library().executorch_mlx_set_cache_limit(_checked_size("set_cache_limit", limit, 0))


def get_memory_limit() -> int | None:
    """Return the memory limit in bytes, or None if there is no limit."""
    return _limit_or_none(_library().executorch_mlx_get_memory_limit())


def set_memory_limit(limit: int | None) -> int | None:
    """Set the memory limit, which is the number of bytes that may be in use. Return the previous limit.

    `mlx.core.set_memory_limit` only gives MLX a guideline. This limit is enforced: a load or a call that would exceed
    it fails. ExecuTorch then returns `MemoryAllocationFailed`, which is a RuntimeError in Python, and the log has a
    line with the sizes. `LLM` raises `OutOfMemoryError`. The mutable buffers of the program, such as KV caches, are
    then as before the call, or undefined until they are reset: the log says which. The call can be repeated after the
    limit is raised, or with smaller inputs; after a reset, the prompt has to be given again.

    The delegate compares the limit with an estimate before an evaluation starts. The estimate counts the results of all
    operations. It counts neither the work space inside most operations nor what other code allocates with MLX at the
    same time. If a call fits only when some results are freed before the others are computed, it runs in stages, and
    waits for the device after each stage.

    While this limit is set, MLX's own limit has the same value, so that MLX frees its cache in time. When this limit is
    removed, MLX's own limit returns to its earlier value.

    Args:
        limit: Bytes, 1 or more. None removes the limit, which is the default.

    Raises:
        ValueError: `limit` is not positive, or too large.
    """
    size = _NO_LIMIT if limit is None else _checked_size("set_memory_limit", limit, 1)
    return _limit_or_none(_library().executorch_mlx_set_memory_limit(size))


def set_wired_limit(limit: int) -> int:
    """Set how many bytes stay resident for an Apple GPU, and return the previous number.

    This requires macOS 15 or later. On other devices it has no effect and returns 0.

    Args:
        limit: Bytes, 0 or more.

    Raises:
        ValueError: `limit` is negative, or more than the system permits.
    """
    previous = ctypes.c_size_t()
    size = _checked_size("set_wired_limit", limit, 0)
    if _library().executorch_mlx_set_wired_limit(size, ctypes.byref(previous)) != 0:
        raise ValueError(f"set_wired_limit: got {limit}, which is more than the system permits")
    return previous.value


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
    ]:
        function = getattr(library, f"executorch_mlx_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _limit_or_none(size: int) -> int | None:
    return None if size == _NO_LIMIT else size


def _checked_size(function: str, limit: int, lowest: int) -> int:
    size = operator.index(limit)
    if not lowest <= size < _NO_LIMIT:
        raise ValueError(f"{function}: got {limit}, expected {lowest} to {_NO_LIMIT - 1} bytes")
    return size
