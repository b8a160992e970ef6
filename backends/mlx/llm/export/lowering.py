"""Lowers the methods of a language model to MLX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge_transform_and_lower
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.passes.remove_unused_parameters_pass import remove_unused_parameters_pass
from torch.export import ExportedProgram, default_decompositions

from ... import weights_file
from ...collector import paused_collector
from ...partitioner import MLXPartitioner, Report
from ...preprocess import NotPortable
from ...quiet import quiet_lowering
from .passes.constant_calls import compute_constant_calls
from .passes.decomposition import decompose

# Models compute the angles of rotary embeddings with complex numbers and in float64.
_LEGALIZE = ("complex", "float64")


@paused_collector()
def lower(
    methods: dict[str, ExportedProgram],
    constant_methods: dict[str, Any],
    *,
    allow_extensions: bool,
    portable: bool = False,
    weights: str | None = None,
) -> tuple[EdgeProgramManager, Report]:
    """Delegate the methods to MLX. Returns the lowered programs and the partitioner's report.

    ExecuTorch's `to_edge_transform_and_lower` traces each graph about seven times, to make it functional, to decompose
    it and to convert it to the edge dialect. The delegate also reads the ATen dialect. This function therefore tries
    to lower the methods without the edge dialect, which traces each graph only once. If a node is then left to
    ExecuTorch's own kernels, which need the edge dialect, it lowers the methods again with
    `to_edge_transform_and_lower`. `weights` is the name of the weights file, or None for weights in the `.pte`.

    Raises RuntimeError if an operator of this package cannot be delegated, because nothing else can run it. With
    `portable`, raises NotPortable if a node is not delegated, or would compute something else on ExecuTorch's own MLX
    delegate.
    """
    for program in methods.values():
        compute_constant_calls(program)
    config = EdgeCompileConfig(_check_ir_validity=False)
    options: dict[str, Any] = {"allow_extensions": allow_extensions, "portable": portable, "weights_file": weights}
    constant_methods = constant_methods | weights_file.methods(weights)
    partitioner = MLXPartitioner(**options, legalize=_LEGALIZE)
    with quiet_lowering():
        table = default_decompositions().materialize()
        decomposed = {name: _decomposed(program, partitioner, table) for name, program in methods.items()}
        lowered = EdgeProgramManager(decomposed, constant_methods, config).to_backend(partitioner)
        if not all(_is_delegated(lowered.exported_program(name)) for name in methods):
            partitioner = MLXPartitioner(**options, legalize=_LEGALIZE)
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
    preserved = partitioner.lowered_targets(program)
    table = {target: decomposition for target, decomposition in table.items() if target not in preserved}
    return remove_unused_parameters_pass(decompose(program, table))


def _is_delegated(program: ExportedProgram) -> bool:
    """Whether the program calls delegates only."""
    calls = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return calls <= {executorch_call_delegate, operator.getitem}
