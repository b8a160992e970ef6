"""Torch operators with which the processes of a tensor-parallel model exchange tensors.

A program with these operators belongs to the process `rank` of a group of `size` processes. Eager torch has no such
group: there, the operators run only inside `simulated_group`, which uses threads as processes. Importing this module
defines the operators in the operator library `mlx`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .library import define

_this_thread = threading.local()


class _Exchange:
    """Exchanges tensors among several threads. `gathered` is the list that `simulated_group` fills."""

    def __init__(self, size: int, gathered: list[torch.Tensor]):
        self.size, self.barrier, self.tensors, self.gathered = size, threading.Barrier(size), [None] * size, gathered

    def gather(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all threads, by rank. Each thread passes its own `rank` and `tensor`."""
        self.tensors[rank] = tensor
        self.barrier.wait()  # until all tensors are there
        result = list(self.tensors)
        self.barrier.wait()  # until all threads have read them
        return result


def simulated_group(functions: Sequence[Callable[[], Any]], gathered: list[torch.Tensor] | None = None) -> list[Any]:
    """Call each function on a thread of its own, as the processes of a group, and return the results in order.

    The results of `all_gather` in process 0 are appended to `gathered`. Raises the exception of a function that fails.
    """
    exchange = _Exchange(len(functions), [] if gathered is None else gathered)
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        _this_thread.exchange = exchange
        try:
            with torch.no_grad():
                results[rank] = functions[rank]()
        except threading.BrokenBarrierError:
            pass  # another function failed
        except BaseException as error:  # raised below
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _gather(name: str, x: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    if size == 1:
        return [x]
    exchange = getattr(_this_thread, "exchange", None)
    if exchange is None or exchange.size != size:
        raise RuntimeError(
            f"mlx::{name}: got no group of {size} processes: eager torch runs it in simulated_group only"
        )
    return exchange.gather(rank, x)


def _all_sum(x, rank, size):
    first, *rest = _gather("all_sum", x, rank, size)
    total = first.float() if first.dtype in (torch.float16, torch.bfloat16) else first.clone()
    for part in rest:
        total = total + part
    return total.to(x.dtype)


# The sum of x over the processes, added in the order of the ranks. Half precision is added in float32.
all_sum = define("all_sum(Tensor x, int rank, int size) -> Tensor", _all_sum, lambda x, rank, size: torch.empty_like(x))


def _all_gather(x, axis, rank, size):
    result = torch.cat(_gather("all_gather", x, rank, size), axis)
    if rank == 0 and size > 1:
        _this_thread.exchange.gathered.append(result)
    return result


def _all_gather_fake(x, axis, rank, size):
    shape = list(x.shape)
    shape[axis] = shape[axis] * size
    return x.new_empty(shape)


# The tensors x of all processes, concatenated along `axis` in the order of the ranks.
all_gather = define("all_gather(Tensor x, int axis, int rank, int size) -> Tensor", _all_gather, _all_gather_fake)
