"""Keeps the number of time steps of recurrent layers dynamic in torch.export.

To find the shapes of the results of `torch.nn.LSTM`, `GRU` and `RNN`, torch runs the cell once for each time step. This
makes the number of steps static: torch.export refuses a dynamic one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..custom_ops.recurrent_layers import RECURRENT_LAYERS, result_shapes

_KEY = DispatchKey.CompositeImplicitAutograd


@contextmanager
def dynamic_steps() -> Iterator[None]:
    """A context manager for `torch.export.export`: the number of time steps of recurrent layers may be dynamic.

    Within the context, torch takes the shapes of the results of a layer from a rule and does not run its steps. It is
    needed for `torch.export.export` only, and also makes the export of a long sequence faster. It is not thread-safe.
    """
    kernels = {target: target.py_kernels[_KEY] for target in RECURRENT_LAYERS}
    try:
        for target, kernel in kernels.items():
            _set_kernel(target, _shapes_or(kernel))
        yield
    finally:
        for target, kernel in kernels.items():
            _set_kernel(target, kernel)


def _shapes_or(kernel: Callable) -> Callable:
    """Return a kernel that finds the shapes of fake tensors by a rule. While a graph is traced, it decomposes."""

    def shapes_or_decomposition(*arguments):
        computes_shapes = isinstance(arguments[0], FakeTensor) and get_proxy_mode() is None
        return (result_shapes if computes_shapes else kernel)(*arguments)

    return shapes_or_decomposition


def _set_kernel(target: OpOverload, kernel: Callable) -> None:
    target.py_kernels[_KEY] = kernel
    target._dispatch_cache.clear()
