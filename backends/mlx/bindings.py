"""Imports ExecuTorch's Python runtime after the delegate is registered."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

from .loader import OtherDelegateError, load_delegate

if TYPE_CHECKING:
    from .programs import Runtime


@functools.cache
def import_runtime() -> type[Runtime]:
    """Register the MLX delegate, then import the class `Runtime` of programs.py and return it.

    If another library has registered an MLXBackend, the first call warns: programs run on that one.

    Raises:
        FileNotFoundError: The same as for `load_delegate`.
        RuntimeError: ExecuTorch could not register the delegate.
    """
    try:
        load_delegate()
    except OtherDelegateError as error:
        message = f"{error}. Programs run on the other delegate, which does not load programs with extensions"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    from .programs import Runtime

    return Runtime
