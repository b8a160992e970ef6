"""Measures the time and the memory that a verification takes."""

from __future__ import annotations

import resource
import sys
import time


class Cost:
    """Measures from its creation on. `peak_before` is the peak memory of the process at that moment, in bytes."""

    def __init__(self):
        self._started, self.peak_before = time.perf_counter(), peak_memory()

    @property
    def seconds(self) -> float:
        """The time since the creation."""
        return time.perf_counter() - self._started

    @property
    def added_memory(self) -> int:
        """The number of bytes by which the peak memory of the process has risen since the creation."""
        return peak_memory() - self.peak_before


def peak_memory() -> int:
    """The largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
