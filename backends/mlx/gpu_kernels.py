"""The kernels of this package for GPUs, which prove themselves on the device.

At the first use of a GPU, each kernel has a trial: its results are compared with those of MLX's operations, or of the
sampler's definition, and its time with that of the operations that it replaces. Only a kernel that is right and not
slower is used. The verdicts hold for the process, and are kept in `$XDG_CACHE_HOME/executorch-mlx` or
`~/.cache/executorch-mlx` for later processes, until the device, the system, MLX or this package changes.

The first call of a function loads the delegate, see `load_delegate`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

from .loader import load_delegate

__all__ = ["Verdict", "choose", "verdicts"]


class Verdict(NamedTuple):
    """What is known about a kernel.

    Attributes:
        kernel: The name of the kernel.
        verdict: "used", "wrong" (its results), "slow", "failed" (with an exception), "crashed" (the process ended in
            the trial, more than once), or "chosen": by `choose` or the environment variable EXECUTORCH_MLX_KERNELS.
        is_used: Whether programs use the kernel.
        error: The largest difference from the reference, as a part of the largest magnitude. 0: equal results.
        microseconds: The time of the work of the trial with the kernel.
        microseconds_without: The time of this work with the operations that the kernel replaces.
        reason: Why the trial failed, or "".
    """

    kernel: str
    verdict: str
    is_used: bool
    error: float
    microseconds: float
    microseconds_without: float
    reason: str


class _Kernel(ctypes.Structure):  # executorch_mlx_kernel in kernels.h
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("verdict", ctypes.c_char_p),
        ("is_used", ctypes.c_int),
        ("error", ctypes.c_double),
        ("microseconds", ctypes.c_double),
        ("microseconds_without", ctypes.c_double),
        ("reason", ctypes.c_char_p),
    )


def verdicts() -> list[Verdict]:
    """Return the kernels of the GPU: none if there is no GPU, or no kernel for it.

    Holds the trials if no program has been loaded on the GPU.

    Raises:
        RuntimeError: The environment variable EXECUTORCH_MLX_KERNELS is invalid, or the GPU cannot be used. The log
            has the reason.
    """
    count = ctypes.c_size_t()
    _check(_library().executorch_mlx_kernels(None, 0, ctypes.byref(count)), "verdicts")
    kernels = (_Kernel * count.value)()
    _check(_library().executorch_mlx_kernels(kernels, count, ctypes.byref(count)), "verdicts")
    return [
        Verdict(
            k.name.decode(),
            k.verdict.decode(),
            bool(k.is_used),
            k.error,
            k.microseconds,
            k.microseconds_without,
            k.reason.decode(errors="replace"),
        )
        for k in kernels
    ]


def choose(choices: str) -> None:
    """Choose kernels that are used or not used without a trial.

    Args:
        choices: Names with "=on" or "=off", such as "sample=off,attention=on". "all" stands for all kernels. They take
            precedence over the environment variable EXECUTORCH_MLX_KERNELS, which has the same form.

    Raises:
        RuntimeError: `choices` is invalid, or a program has been loaded on the GPU, or the trials were held. The log
            has the reason.
    """
    _check(_library().executorch_mlx_choose_kernels(choices.encode()), f"choose: choices: got {choices!r}")


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"{what}: error {status:#x}, see the log")


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(load_delegate())
    size = ctypes.POINTER(ctypes.c_size_t)
    library.executorch_mlx_kernels.argtypes = [ctypes.POINTER(_Kernel), ctypes.c_size_t, size]
    library.executorch_mlx_choose_kernels.argtypes = [ctypes.c_char_p]
    return library
