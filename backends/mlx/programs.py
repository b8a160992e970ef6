"""ExecuTorch's `Runtime`, `Program` and `Method`, for use with the delegate.

They differ from those of ExecuTorch in these points:

- A method keeps its program. A method of ExecuTorch reads freed memory if its program is gone.
- An error contains the lines that ExecuTorch and the delegate have logged about it.
- An input in another memory format than the method expects is an error. ExecuTorch would read its elements in the
  wrong order.
- Outputs are copied on one thread, unless they are large: see workarounds/output_copies.py.

The module imports ExecuTorch's bindings, so that the delegate has to be registered first: see
`bindings.import_runtime`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import executorch.runtime
import numpy as np
import torch

from . import weights_file
from .loader import delegate_library
from .workarounds.output_copies import one_openmp_thread

_MAX_AXES = 16
# Elements of all outputs. torch copies up to this number without threads.
_SMALL = 1 << 15
# The copy of more takes longer than the threads of OpenMP spin after it.
_LARGE = 1 << 21


class Method(executorch.runtime.Method):
    """A method of a loaded program. It keeps the program and its bytes."""

    def __init__(self, method: Any, name: str, program: Any, data: bytes | None, orders: list[tuple[int, ...] | None]):
        super().__init__(method)
        self._name = name
        self._program, self._data = program, data  # freed after the method, in this order
        self._orders = orders
        self._is_contiguous = [order is not None and order == tuple(range(len(order))) for order in orders]
        self._take_errors = _library().executorch_mlx_take_errors
        self._copies_on_one_thread = True

    def execute(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Call the method, and return its outputs as a list.

        Raises RuntimeError, with the lines of the log, if the call fails.
        """
        # A call of a small program takes 15 us: a context manager that changes nothing would be a tenth of it.
        for x, is_contiguous in zip(inputs, self._is_contiguous):
            if isinstance(x, torch.Tensor) and not (is_contiguous and x.is_contiguous()):
                self._check_memory_formats(inputs)
                break
        self._take_errors()
        try:
            if self._copies_on_one_thread:
                with one_openmp_thread():
                    outputs = self._method(inputs)
            else:
                outputs = self._method(inputs)
        except RuntimeError as error:
            _add_lines(error)
            raise
        elements = 0
        for y in outputs:
            if isinstance(y, torch.Tensor):
                elements += y.numel()
        self._copies_on_one_thread = _SMALL < elements <= _LARGE  # in the next call
        return outputs

    def _check_memory_formats(self, inputs: Sequence[Any]) -> None:
        for index, (x, order, is_contiguous) in enumerate(zip(inputs, self._orders, self._is_contiguous)):
            if not isinstance(x, torch.Tensor) or order is None or x.ndim != len(order):
                continue
            if not (x if is_contiguous else x.permute(order)).is_contiguous():
                expected = "contiguous tensor" if is_contiguous else f"tensor with the axes {order} from outer to inner"
                raise RuntimeError(
                    f"{self._name}: input {index}: got strides {x.stride()} for shape {tuple(x.shape)}, expected a "
                    f"{expected}"
                )


class Program(executorch.runtime.Program):
    """A loaded program. `orders` has, for each method and input, the order of its axes, or None if it is no tensor."""

    def __init__(self, program: Any, data: bytes | None, orders: dict[str, list[tuple[int, ...] | None]]):
        super().__init__(program, data)
        self._orders = orders

    def load_method(self, name: str) -> Method:
        """Load a method. Later calls return the same object.

        Raises KeyError if the program has no such method, and RuntimeError, with the lines of the log, if it cannot be
        loaded.
        """
        if self._methods[name] is None:
            with _logged_errors():
                method = self._program.load_method(name)
            self._methods[name] = Method(method, name, self._program, self._data, self._orders[name])
        return self._methods[name]


class Runtime(executorch.runtime.Runtime):
    """ExecuTorch's runtime. `Runtime.get()` returns the only instance."""

    @staticmethod
    @functools.cache
    def get() -> Runtime:
        import executorch.extension.pybindings.portable_lib as bindings

        _library().executorch_mlx_collect_errors()
        return Runtime(legacy_module=bindings)

    def load_program(self, data: Any, **options: Any) -> Program:
        """Load a program from a path, from bytes or from a file object. The options are those of ExecuTorch.

        If the program of a path has a weights file, this is in the same folder, unless `data_path` names it.

        Raises RuntimeError, with the lines of the log, if the program cannot be loaded, and FileNotFoundError if its
        weights file is missing.
        """
        if hasattr(data, "read"):
            data = data.read()
        with _logged_errors():
            loaded = super().load_program(data, **options)
            if options.get("data_path") is None and weights_file.METHOD in loaded.method_names:
                path = _weights_file(loaded, data)
                loaded = super().load_program(data, **options | {"data_path": path})
        contents = np.memmap(data, mode="r") if loaded._data is None else np.frombuffer(loaded._data, np.uint8)
        orders = {name: _input_orders(contents, loaded, name) for name in loaded.method_names}
        return Program(loaded._program, loaded._data, orders)


def _weights_file(program: Any, source: Any) -> Path:
    name = bytes(program.load_method(weights_file.METHOD).execute([])[0].numpy()).decode()
    if not isinstance(source, (str, Path)):
        raise ValueError(f"load_program: data_path: the program in memory has its weights in {name}; pass its path")
    path = Path(source).parent / name
    if not path.is_file():
        raise FileNotFoundError(f"load_program: {source}: its weights file {path} is missing")
    return path


@contextmanager
def _logged_errors() -> Iterator[None]:
    """Add the error lines that ExecuTorch logs in the context to the message of a RuntimeError."""
    _library().executorch_mlx_take_errors()
    try:
        yield
    except RuntimeError as error:
        _add_lines(error)
        raise


def _add_lines(error: RuntimeError) -> None:
    if lines := _library().executorch_mlx_take_errors().decode(errors="replace"):
        error.args = (f"{error}\n{lines}",)


def _input_orders(contents: np.ndarray, program: Any, method: str) -> list[tuple[int, ...] | None]:
    orders, order = [], (ctypes.c_uint8 * _MAX_AXES)()
    for index in range(program.metadata(method).num_inputs()):
        address = ctypes.c_void_p(contents.ctypes.data)
        count = _library().executorch_mlx_input_order(
            address,
            ctypes.c_size_t(contents.size),
            method.encode(),
            ctypes.c_size_t(index),
            order,
            ctypes.c_size_t(_MAX_AXES),
        )
        orders.append(tuple(order[:count]) if count >= 0 else None)
    return orders


@functools.cache
def _library() -> ctypes.CDLL:
    library = delegate_library()
    library.executorch_mlx_take_errors.restype = ctypes.c_char_p
    return library
