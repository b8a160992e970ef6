"""Finds out how the weights of a model are split, from the graphs of its methods.

A walk visits the nodes of a graph in order. It splits the weight of a matrix product by its outputs if the input of the
product is whole: each process then computes a part of the outputs. The operators that follow compute with these parts.
The next product takes a part of the outputs as its input. Its weight is therefore split by its inputs, and the results
of all processes are added. If an operator in between needs a whole tensor, the walk ends. The weights that computed
this tensor are marked as whole, and a new walk starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from .analysis import Analysis, Layouts, TensorSplit
from .layout import CannotSplit, Refine
from .rules import rule_of

_WHOLE_SHARE = 0.25  # the largest share of the bytes of the weights of products that may stay whole


@dataclass
class Plan:
    """How a model is split.

    - `analyses`: the walk over the graph of each method.
    - `tensors`: how each weight or buffer that is split is split, by name.
    - `whole`: the name of a weight of a matrix product that stays whole → the reason.
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
            analyses = {name: Analysis(program, layouts, rule_of) for name, program in methods.items()}
        except Refine as request:
            old = layouts.segments.get(request.weight)
            if old is None:
                layouts.segments[request.weight] = request.parts
            else:
                layouts.segments[request.weight] = (*old[: request.index], *request.parts, *old[request.index + 1 :])
        except CannotSplit as error:
            if not _made_progress(layouts):
                raise ValueError(f"export_llm: tensor_parallel: the model cannot be split: {error}") from error
        else:
            break
    tensors: dict[str, TensorSplit] = {}
    for analysis in analyses.values():
        tensors |= analysis.tensors
    program = next(iter(methods.values()))
    result = Plan(processes, analyses, tensors, _whole_weights(analyses, tensors, layouts))
    _check(result, program, next(iter(layouts.whole.values()), "its queries are whole"))
    return result


def _made_progress(layouts: Layouts) -> bool:
    """Whether a weight was added to `layouts.whole` since the last call of this function."""
    before, layouts.seen = layouts.seen, len(layouts.whole)
    return layouts.seen > before


def _whole_weights(
    analyses: Mapping[str, Analysis], tensors: Mapping[str, TensorSplit], layouts: Layouts
) -> dict[str, str]:
    names = sorted(_product_weights(analyses) - set(tensors))
    return {name: layouts.whole.get(name, "its inputs are whole") for name in names}


def _product_weights(analyses: Mapping[str, Analysis]) -> set[str]:
    return set().union(*(analysis.product_weights for analysis in analyses.values()))


def _check(result: Plan, program: ExportedProgram, reason: str) -> None:
    """Raise ValueError if an attention stays whole, or too large a share of the weights.

    `reason` is the first reason that a walk has found.
    """
    if any(analysis.whole_attentions for analysis in result.analyses.values()):
        raise ValueError(
            f"export_llm: tensor_parallel: the attention cannot be split among {result.processes} processes: {reason}"
        )
    all_tensors = tensors_of(program)
    sizes = {name: all_tensors[name].nbytes for name in _product_weights(result.analyses) if name in all_tensors}
    whole, total = sum(sizes.get(name, 0) for name in result.whole), sum(sizes.values())
    if whole > _WHOLE_SHARE * total:
        largest = max(result.whole, key=lambda name: sizes.get(name, 0))
        raise ValueError(
            f"export_llm: tensor_parallel: {whole / total:.0%} of the weights of products cannot be split among "
            f"{result.processes} processes, expected at most {_WHOLE_SHARE:.0%}; the largest is {largest}: "
            f"{result.whole[largest]}"
        )


def tensors_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the weights, buffers and constants of a program by name."""
    return {**program.state_dict, **{n: t for n, t in program.constants.items() if isinstance(t, torch.Tensor)}}
