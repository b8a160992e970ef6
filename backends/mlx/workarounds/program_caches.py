"""Clears the caches of torch and ExecuTorch that keep exported programs alive."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from executorch.exir.backend.utils import is_same_node
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextmanager
def forget_programs() -> Iterator[None]:
    """A context manager and decorator for exports: clears, at its end, caches that hold every program of the process.

    Their keys refer to nodes of a graph, to delegates or to symbolic sizes, from which the whole program with its
    weights can be reached. Each `ShapeEnv` also has such a cache. It is part of a cycle that Python's garbage collector
    cannot free: the sizes of the program's tensors refer to the `ShapeEnv` from C++. The collector also takes longer
    with each program that is alive: after thousands of small ones, an export took five times as long.
    """
    try:
        yield
    finally:
        FakeTensorMode.cache_clear()
        for function in (is_same_node, *vars(ShapeEnv).values()):
            if hasattr(function, "cache_clear"):
                function.cache_clear()
        for x in gc.get_referrers(ShapeEnv):  # among others, the instances
            if type(x) is ShapeEnv:
                x.fake_tensor_cache.clear()
