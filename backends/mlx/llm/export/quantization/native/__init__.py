"""The native kernel of `scale_search`: the library of scale_search.cpp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from .....loader import load_scale_search

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # dtype → Dtype in scale_search.cpp
_GROUP_SIZES = (32, 64, 128)


def quantize(
    w: torch.Tensor,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    importance: torch.Tensor | None = None,
    *,
    searches: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return what `scale_search.fit` returns for floats [..., K], or without `searches`, what `fit_range` returns.

    The results have the bits that torch computes on an x86 CPU. Returns None if the library is not built or lacks the
    format, if `w` is not contiguous, or if a weight is too large or not finite.
    """
    function = _function()
    is_known = w.dtype in _DTYPES and dtype in _DTYPES and group_size in _GROUP_SIZES
    if function is None or not is_known or w.device.type != "cpu" or not w.is_contiguous() or not w.numel():
        return None
    packed = torch.empty(*w.shape[:-1], w.shape[-1] * bits // 32, dtype=torch.uint32)
    scales = torch.empty(*w.shape[:-1], w.shape[-1] // group_size, dtype=dtype)
    biases = torch.empty_like(scales)
    groups, weight = 1, None
    if importance is not None:
        weight = importance.detach().float().contiguous()
        groups = weight.numel() // group_size
    is_quantized = function(
        w.data_ptr(),
        _DTYPES[w.dtype],
        scales.numel(),
        group_size,
        bits,
        searches,
        None if weight is None else weight.data_ptr(),
        groups,
        packed.data_ptr(),
        _DTYPES[dtype],
        scales.data_ptr(),
        biases.data_ptr(),
        torch.get_num_threads(),
    )
    return (packed, scales, biases) if is_quantized else None


@functools.cache
def _function() -> Callable | None:
    library = load_scale_search()
    if library is None:
        return None
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    function = library.executorch_mlx_quantize
    function.restype = integer
    function.argtypes = [
        pointer,
        integer,
        size,
        integer,
        integer,
        integer,
        pointer,
        size,
        pointer,
        integer,
        pointer,
        pointer,
        integer,
    ]
    return function
