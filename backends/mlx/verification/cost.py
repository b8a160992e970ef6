"""The time and memory of a check."""

from __future__ import annotations

import resource
import sys
import time


class Cost:
    """Counts from its creation. `seconds` is the time so far."""

    def __init__(self):
        self._started, self.peak_before = time.perf_counter(), peak_memory()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def added_memory(self) -> int:
        """The bytes by which the peak memory of the process rose."""
        return peak_memory() - self.peak_before


def peak_memory() -> int:
    """The largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
