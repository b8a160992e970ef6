"""Lowers the methods of a language model to MLX."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge_transform_and_lower
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.passes.remove_unused_parameters_pass import remove_unused_parameters_pass
from torch.export import ExportedProgram, default_decompositions
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from ...collector import paused_collector
from ...partitioner import MLXPartitioner, Report
from ...preprocess import NotPortable
from ...quiet import quiet_lowering
from .passes.constant_calls import compute_constant_calls
from .passes.decomposition import decompose
from .passes.last_token import narrow_to_last_token

# Models compute the angles of rotary embeddings with complex numbers and in float64.
_LEGALIZE = ("complex", "float64")


@paused_collector()
def lower(
    methods: dict[str, ExportedProgram], constant_methods: dict[str, Any], *, allow_extensions: bool,
    portable: bool = False,
) -> tuple[EdgeProgramManager, Report]:
    """Delegate the methods to MLX. Returns the lowered programs and the partitioner's report.

    ExecuTorch's `to_edge_transform_and_lower` traces each graph about seven times, to make it functional, to decompose
    it and to convert it to the edge dialect. The delegate also reads the ATen dialect. This function therefore tries
    to lower the methods without the edge dialect, which traces each graph only once. If a node is then left to
    ExecuTorch's own kernels, which need the edge dialect, it lowers the methods again with
    `to_edge_transform_and_lower`.

    Raises RuntimeError if an operator of this package cannot be delegated, because nothing else can run it. With
    `portable`, raises NotPortable if a node is not delegated, or would compute something else on ExecuTorch's own MLX
    delegate.
    """
    for program in methods.values():
        compute_constant_calls(program)
        narrow_to_last_token(program)
    config = EdgeCompileConfig(_check_ir_validity=False)
    partitioner = MLXPartitioner(allow_extensions=allow_extensions, portable=portable, legalize=_LEGALIZE)
    # torch generates the Python code of a traced graph only if the code runs.
    with quiet_lowering(), _use_lazy_graph_module(True):
        table = default_decompositions().materialize()
        with _modules_stay_as_they_are():
            decomposed = {name: _decomposed(program, partitioner, table) for name, program in methods.items()}
            lowered = EdgeProgramManager(decomposed, constant_methods, config).to_backend(partitioner)
        if not all(_is_delegated(lowered.exported_program(name)) for name in methods):
            partitioner = MLXPartitioner(allow_extensions=allow_extensions, portable=portable, legalize=_LEGALIZE)
            lowered = to_edge_transform_and_lower(
                methods,
                partitioner={name: [partitioner] for name in methods},
                constant_methods=constant_methods,
                compile_config=config,
            )
    report = partitioner.explain()
    if portable and report.refused:
        raise NotPortable("\n".join(str(report).splitlines()[1:]))
    for decision in report.refused:
        if decision.target.startswith("mlx."):
            raise RuntimeError(f"{decision.node}: {decision.target} cannot be delegated to MLX: {decision.reason}")
    return lowered, report


def _decomposed(
    program: ExportedProgram, partitioner: MLXPartitioner, table: Mapping[Any, Callable]
) -> ExportedProgram:
    """Return a functional program in which the operators without a handler of the delegate are decomposed by `table`.

    Unused parameters and the assertions about dtypes are removed, as `to_edge_transform_and_lower` does.
    """
    program = partitioner.transform_for_pre_decomposition(program)
    preserved = set(partitioner.ops_to_not_decompose(program)[0])
    table = {target: decomposition for target, decomposition in table.items() if target not in preserved}
    return remove_unused_parameters_pass(decompose(program, table))


def _is_delegated(program: ExportedProgram) -> bool:
    """Whether the program calls delegates only."""
    calls = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return calls <= {executorch_call_delegate, operator.getitem}


@contextmanager
def _modules_stay_as_they_are() -> Iterator[None]:
    """Keep torch.fx from replacing two methods of `torch.nn.Module` before each trace, and restoring them after it.

    The lowering traces hundreds of single operators and functions, which use no module. Each replacement visits all
    subclasses of `Module`, of which transformers has thousands, and takes longer than the rest of such a trace. In this
    context, the methods are already marked as replaced.
    """
    originals = {name: getattr(torch.nn.Module, name) for name in ("__getattr__", "__call__")}
    try:
        for name, original in originals.items():
            setattr(torch.nn.Module, name, _marked_as_replaced(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.nn.Module, name, original)


def _marked_as_replaced(function: Callable) -> Callable:
    """Return a function that does the same, with the mark of torch.fx for methods that it has already replaced."""

    @functools.wraps(function)
    def same(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    same.__fx_already_patched = True
    return same
