"""`ArrayProgram`: a `.pte` whose methods take and return arrays of numpy, through the C API `program.h`.

Needs no torch. A test compares the declarations here with the header.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..llm import binding
from ..llm.binding import MAX_RANK, Array
from .config import CONFIG

if TYPE_CHECKING:
    import numpy as np

_BFLOAT16 = 15
# The numbers of the dtypes, and their names in numpy, which has no bfloat16.
_DTYPES = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    11: "bool",
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


_HANDLE = c_void_p
# The name of a function without the prefix "executorch_mlx_program_" → the type of its result, those of its arguments.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "load": (c_int32, [c_char_p, c_char_p, POINTER(_HANDLE)]),
    "free": (None, [_HANDLE]),
    "methods": (c_char_p, [_HANDLE]),
    "get_int": (c_int32, [_HANDLE, c_char_p, POINTER(c_int64)]),
    "get_data": (c_int32, [_HANDLE, c_char_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "call": (c_int32, [_HANDLE, c_char_p, POINTER(Array), c_size_t, POINTER(Array), c_size_t, POINTER(c_double)]),
}


@cache
def library() -> SimpleNamespace:
    """Load the engine, and return an object with the functions of `FUNCTIONS` as attributes."""
    return binding.bound("executorch_mlx_program_", FUNCTIONS)


def is_encoder(path: str | Path, device: str | None = None) -> bool:
    """Whether the program `path` is an encoder. Raises the errors of `ArrayProgram`."""
    program = ArrayProgram(path, device=device)
    try:
        return program.data(CONFIG) is not None
    finally:
        program.close()


class ArrayProgram:
    """A loaded program. All methods may be called from any thread; calls wait for each other.

    - `device`: `cpu`, `gpu`, or None for the default.

    Attributes: `path`; `methods`, the names of its methods.

    Raises FileNotFoundError if the file does not exist, ValueError if it is not a program, RuntimeError if ExecuTorch
    rejects it, and OutOfMemoryError, which is a RuntimeError, if it does not fit into memory.
    """

    def __init__(self, path: str | Path, *, device: str | None = None):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._library, self._handle, self._lock = library(), c_void_p(), threading.Lock()
        name = None if device is None else device.encode()
        binding.check(self._library.load(os.fsencode(path), name, ctypes.byref(self._handle)))
        self._finalizer = weakref.finalize(self, self._library.free, self._handle)
        self.methods: tuple[str, ...] = tuple(self._library.methods(self._handle).decode().split("\n"))

    def close(self) -> None:
        """Free the program, after the call that runs. Later calls raise RuntimeError."""
        with self._lock:
            self._finalizer()

    def get(self, name: str, default: int | None = None) -> int | None:
        """Return the value of an integer of the metadata, or `default` if the program lacks it."""
        value = c_int64()
        with self._lock:
            self._check_open()
            status = self._library.get_int(self._handle, name.encode(), ctypes.byref(value))
        if status == binding.NOT_FOUND:
            return default
        binding.check(status)
        return value.value

    def data(self, name: str) -> bytes | None:
        """Return an array of the metadata, or None if the program lacks it."""
        data, size = c_void_p(), c_size_t()
        with self._lock:
            self._check_open()
            status = self._library.get_data(self._handle, name.encode(), ctypes.byref(data), ctypes.byref(size))
            if status == binding.NOT_FOUND:
                return None
            binding.check(status)
            return ctypes.string_at(data, size.value)

    def call(self, method: str, inputs: Sequence[np.ndarray], outputs: int = 1) -> list[np.ndarray]:
        """Call a method, and return copies of its `outputs` results. bfloat16 becomes float32.

        Raises ValueError for inputs that the method does not take, and RuntimeError if the call fails.
        """
        import numpy as np

        arrays = [np.ascontiguousarray(array) for array in inputs]
        given = (Array * len(arrays))(*map(_array_of, arrays))
        results = (Array * outputs)(*(Array(size=ctypes.sizeof(Array)) for _ in range(outputs)))
        with self._lock:
            self._check_open()
            status = self._library.call(self._handle, method.encode(), given, len(arrays), results, outputs, None)
            binding.check(status)
            return [_copied(result) for result in results]

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"{self.path.name} is closed")


def _array_of(array: np.ndarray) -> Array:
    dtype = array.dtype
    if dtype.name not in _NUMBERS or not dtype.isnative or array.ndim > MAX_RANK:
        raise ValueError(f"inputs: got {dtype} of rank {array.ndim}, expected a number of rank up to {MAX_RANK}")
    shape = (c_int64 * MAX_RANK)(*array.shape)
    return Array(ctypes.sizeof(Array), _NUMBERS[dtype.name], array.ndim, shape, array.ctypes.data)


def _copied(array: Array) -> np.ndarray:
    import numpy as np

    shape = tuple(array.shape[: array.rank])
    dtype = np.dtype("uint16" if array.dtype == _BFLOAT16 else _DTYPES[array.dtype])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    values = np.frombuffer(ctypes.string_at(array.data, size), dtype).reshape(shape)
    if array.dtype == _BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values
