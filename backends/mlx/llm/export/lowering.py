"""Lowers the methods of a language model to MLX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge_transform_and_lower
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.passes.remove_unused_parameters_pass import remove_unused_parameters_pass
from torch.export import ExportedProgram, default_decompositions
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from ...collector import paused_collector
from ...partitioner import MLXPartitioner, Report
from ...quiet import quiet_lowering
from .constant_calls import compute_constant_calls
from .decomposition import decompose


@paused_collector()
def lower(
    methods: dict[str, ExportedProgram], constant_methods: dict[str, Any], *, allow_extensions: bool
) -> tuple[EdgeProgramManager, Report]:
    """Delegate the methods to MLX. Returns the lowered programs and the partitioner's report.

    ExecuTorch's `to_edge_transform_and_lower` traces each graph about seven times, to make it functional, to decompose
    it and to convert it to the edge dialect. The delegate also reads the ATen dialect. This function therefore tries
    to lower the methods without the edge dialect, which traces each graph only once. If a node is then left to
    ExecuTorch's own kernels, which need the edge dialect, it lowers the methods again with
    `to_edge_transform_and_lower`.
    """
    for program in methods.values():
        compute_constant_calls(program)
    config = EdgeCompileConfig(_check_ir_validity=False)
    partitioner = MLXPartitioner(allow_extensions=allow_extensions)
    # torch generates the Python code of a traced graph only if the code runs.
    with quiet_lowering(), _use_lazy_graph_module(True):
        table = default_decompositions().materialize()
        decomposed = {name: _decomposed(program, partitioner, table) for name, program in methods.items()}
        lowered = EdgeProgramManager(decomposed, constant_methods, config).to_backend(partitioner)
        if not all(_is_delegated(lowered.exported_program(name)) for name in methods):
            partitioner = MLXPartitioner(allow_extensions=allow_extensions)
            lowered = to_edge_transform_and_lower(
                methods,
                partitioner={name: [partitioner] for name in methods},
                constant_methods=constant_methods,
                compile_config=config,
            )
    return lowered, partitioner.explain()


def _decomposed(
    program: ExportedProgram, partitioner: MLXPartitioner, table: Mapping[Any, Callable]
) -> ExportedProgram:
    """Returns a functional program in which the operators without a handler of the delegate are decomposed by `table`.

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
