"""The native kernel of `scale_search`: the library of scale_search.cpp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from ....loader import load_scale_search

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # dtype of scales and biases → Dtype in scale_search.cpp
_GROUP_SIZES = (32, 64, 128)


def fit_groups(
    x: torch.Tensor, bits: int, dtype: torch.dtype, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return integers (uint8, as `x`), scales and biases [N, K / G] of `dtype` for groups of floats [N, K / G, G].

    They have the bits that `scale_search.search` and `integers` compute on an x86 CPU. `importance` is [K / G, G]. Returns
    None if the library is not built, lacks the format, or finds a weight that is not finite or larger than 1e18.
    """
    function = _function()
    size = x.shape[-1]
    if function is None or size not in _GROUP_SIZES or dtype not in _DTYPES or x.device.type != "cpu" or not x.numel():
        return None
    x = x.contiguous()
    codes, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape[:-1])
    biases = torch.empty_like(scales)
    groups, weight = 1, None
    if importance is not None:
        weight = importance.detach().float().contiguous()
        groups = weight.numel() // size
    is_fitted = function(
        x.data_ptr(), scales.numel(), size, bits, _DTYPES[dtype], None if weight is None else weight.data_ptr(), groups,
        codes.data_ptr(), scales.data_ptr(), biases.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return (codes, scales.to(dtype), biases.to(dtype)) if is_fitted else None


@functools.cache
def _function() -> Callable | None:
    library = load_scale_search()
    if library is None:
        return None
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    function = library.executorch_mlx_fit_groups
    function.restype = integer
    function.argtypes = [
        pointer, size, integer, integer, integer, pointer, size, pointer, pointer, pointer, integer,
    ]  # fmt: skip
    return function
