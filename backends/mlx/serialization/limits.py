"""Limits on the programs that the inspector accepts. They bound its time and memory for hostile files.

The runtime has the same limits on slots, axes and nesting.
"""

from __future__ import annotations

from . import ir
from .listing import tensor_ids

MAX_SLOTS = 1 << 20
MAX_RANK = 16
MAX_NESTING = 64
MAX_INFERENCE_STEPS = 1 << 18
"""The limit on the steps of type inference.

An instruction takes one step, plus one for each entry of its lists. It counts again at each place that runs its chain.
"""

MAX_INTEGER = (1 << 63) - 1


class ProgramError(Exception):
    """Raised if a file cannot be inspected. The message is one sentence for the user."""


def check_limits(graph: ir.MLXGraph) -> None:
    """Raise ValueError if a program exceeds the limits on slots and axes, or if `tensor_meta` has too few entries."""
    # Every tensor slot that is not a temporary has a type in `tensor_meta`.
    num_declared = tensor_ids(graph)["temporary"].start
    total = num_declared + graph.num_temp_tensors
    metas = graph.tensor_meta or []
    if max(total, graph.num_values) > MAX_SLOTS:
        raise ValueError(f"got {total} tensor slots and {graph.num_values} value slots, expected at most {MAX_SLOTS}")
    if len(metas) < num_declared:
        raise ValueError(f"tensor_meta: got {len(metas)} entries, expected {num_declared}")
    for i, meta in enumerate(metas):
        if len(meta.shape) > MAX_RANK:
            raise ValueError(f"tensor_meta {i}: got {len(meta.shape)} dimensions, expected at most {MAX_RANK}")
