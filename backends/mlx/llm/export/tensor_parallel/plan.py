"""Finds out how the weights of a model are split, from the graphs of its methods.

The walk over a graph first assumes that every product with a whole input is split by its outputs. The operators that
follow pass the split on, up to a product that takes its inputs split: after it, the results of all processes are added.
An operator that needs the whole tensor stops the walk. The weights behind it then stay whole, and the walk starts again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from .analysis import Analysis, Layouts, TensorSplit
from .layout import CannotSplit, Refine

_WHOLE_SHARE = 0.25  # of the bytes of all weights, at most, that may stay whole


@dataclass
class Plan:
    """How a model is split.

    - `analyses`: for each method.
    - `tensors`: the weights and buffers that are split, by name.
    - `whole`: the weights of products that stay whole, and why.
    """

    processes: int
    analyses: dict[str, Analysis]
    tensors: dict[str, TensorSplit]
    whole: dict[str, str]


def plan(methods: Mapping[str, ExportedProgram], processes: int, vocab_size: int) -> Plan:
    """Find out how to split the model. Raises ValueError if it cannot be split for so many processes."""
    layouts = Layouts(processes, vocab_size)
    while True:
        try:
            analyses = {name: Analysis(program, layouts) for name, program in methods.items()}
        except Refine as finer:
            old = layouts.segments.get(finer.weight)
            if old is None:
                layouts.segments[finer.weight] = finer.parts
            else:
                layouts.segments[finer.weight] = (*old[: finer.index], *finer.parts, *old[finer.index + 1 :])
        except CannotSplit as error:
            if not _made_progress(layouts):
                raise ValueError(f"export_llm: tensor_parallel: the model cannot be split: {error}") from error
        else:
            break
    tensors: dict[str, TensorSplit] = {}
    for analysis in analyses.values():
        tensors |= analysis.tensors
    program = next(iter(methods.values()))
    result = Plan(processes, analyses, tensors, _whole(analyses, tensors, layouts))
    _check(result, program, next(iter(layouts.whole.values()), "its queries are whole"))
    return result


def _made_progress(layouts: Layouts) -> bool:
    """Whether a weight was added to those that stay whole since the last call."""
    before, layouts.seen = layouts.seen, len(layouts.whole)
    return layouts.seen > before


def _whole(analyses: Mapping[str, Analysis], tensors: Mapping[str, TensorSplit], layouts: Layouts) -> dict[str, str]:
    names = set().union(*(analysis.products for analysis in analyses.values()))
    return {name: layouts.whole.get(name, "its inputs are whole") for name in sorted(names - set(tensors))}


def _check(result: Plan, program: ExportedProgram, reason: str) -> None:
    """Raise ValueError if an attention or too many of the weights stay whole. `reason` is the first reason found."""
    if any(analysis.whole_attentions for analysis in result.analyses.values()):
        raise ValueError(
            f"export_llm: tensor_parallel: the attention cannot be split among {result.processes} processes: {reason}"
        )
    sizes = {name: tensor.nbytes for name, tensor in program.state_dict.items()}
    whole = sum(sizes.get(name, 0) for name in result.whole)
    total = whole + sum(sizes.get(name, 0) for name in result.tensors)
    if whole > _WHOLE_SHARE * total:
        largest = max(result.whole, key=lambda name: sizes.get(name, 0))
        raise ValueError(
            f"export_llm: tensor_parallel: {whole / total:.0%} of the weights cannot be split among {result.processes} "
            f"processes, expected at most {_WHOLE_SHARE:.0%}; the largest is {largest}: {result.whole[largest]}"
        )


def parameters(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the weights, buffers and constants of a program by name."""
    return {**program.state_dict, **{n: t for n, t in program.constants.items() if isinstance(t, torch.Tensor)}}
