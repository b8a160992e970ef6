"""Copies the outputs of programs on one thread, so that the processors are free for the next call.

ExecuTorch's `Method.execute` copies outputs with torch. torch copies more than 32,768 elements with the threads of
OpenMP, which then spin for some milliseconds in case there is more work for them. The next call would have to share the
processors with these threads.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_openmp_thread() -> Iterator[None]:
    """Give OpenMP one thread in the calling thread. Has an effect on Linux only, and only if torch uses OpenMP."""
    set_threads = _set_threads()
    if set_threads is None:
        yield
        return
    # OpenMP keeps a number of threads for each calling thread. torch.set_num_threads() would change the number for
    # others too. torch.get_num_threads() makes sure that torch has already set the number in this thread.
    threads = torch.get_num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)


@functools.cache
def _set_threads() -> Callable[[int], None] | None:
    return getattr(ctypes.CDLL(None), "omp_set_num_threads", None) if sys.platform == "linux" else None
