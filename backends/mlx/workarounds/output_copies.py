"""Copies the outputs of programs on one thread, so that the processors are free for the next call.

ExecuTorch's `Method.execute` copies outputs with torch. torch copies more than 32,768 elements with the threads of
OpenMP, which then spin for some milliseconds in case there is more work for them. The next call would have to share the
processors with these threads.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executorch.runtime import Method

# Elements of all outputs. The copy of more takes longer than the threads spin.
_LARGE = 1 << 21


def copy_outputs_on_one_thread() -> None:
    """Change `Method.execute` of ExecuTorch: while it runs, OpenMP has one thread in the calling thread.

    If the outputs of a call are large, the next call of the method may copy them with several threads. Call this
    function once. It only has an effect on Linux, and if torch uses OpenMP.
    """
    import torch
    from executorch.runtime import Method

    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None) if sys.platform == "linux" else None
    if set_threads is None:
        return
    execute = Method.execute

    @functools.wraps(execute)
    def execute_on_one_thread(self: Method, inputs: Sequence[Any]) -> Sequence[Any]:
        # OpenMP keeps a number of threads for each calling thread. torch.set_num_threads() would change the number for
        # others too. torch.get_num_threads() makes sure that torch has already set the number in this thread.
        threads = torch.get_num_threads()
        is_large = getattr(self, "_had_large_outputs", False)
        set_threads(threads if is_large else 1)
        try:
            outputs = execute(self, inputs)
        finally:
            set_threads(threads)
        elements = sum(y.numel() for y in outputs if isinstance(y, torch.Tensor))
        self._had_large_outputs = elements > _LARGE
        return outputs

    Method.execute = execute_on_one_thread
