"""Lowers an exported program to instructions.

`ProgramBuilder` walks the graph and calls the handler of each FX node. The partitioner uses this walk as a dry run
(`check`), and the backend uses it to compile (`build`). `assemble` turns the result into an MLX program.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..serialization.portability import Problem
from .interface import bind_inputs, bind_outputs
from .lowering import Lowering, call_handler, undelegated_slots
from .matcher import Match
from .portable import make_portable
from .registry import REGISTRY, Registry, Unsupported, aten_target, target_name


class ProgramBuilder(Lowering):
    """Lowers the graph of an exported program. The parameters are those of `Lowering`.

    With `portable`, nodes that would compute something else on ExecuTorch's own MLX delegate are unsupported.
    """

    def __init__(
        self,
        program: ExportedProgram,
        registry: Registry = REGISTRY,
        *,
        allow_extensions: bool = False,
        buffer_keys: Mapping[str, str] = MappingProxyType({}),
        portable: bool = False,
    ):
        super().__init__(program, registry, allow_extensions=allow_extensions, buffer_keys=buffer_keys)
        self.portable = portable
        # For `check`: what is different on ExecuTorch's own MLX delegate, with the FX node for which it is so.
        self.differences: list[tuple[Node | None, Problem]] = []

    def check(self) -> dict[Node, str | None]:
        """Lower the graph as a dry run, which reads the data of no constant. It binds no outputs: which values leave
        the delegate is known when the partitioner has chosen the nodes.

        Returns a dictionary of the call nodes of the graph. The value is the reason why the node is unsupported, or
        None if the node can be lowered.
        """
        self._dry_run = True
        bind_inputs(self)
        self._lower_graph(self.program.graph_module)
        self._check_portability()
        return self._reasons

    def _check_portability(self) -> None:
        """Record the `differences`. With `portable`, they are the reasons why their nodes are unsupported."""
        left = make_portable(self)
        self.differences = [(node, problem) for node, problem in left.differences if self._reasons.get(node) is None]
        reasons = left.unsupported
        if self.portable:
            reasons += [(node, f"on ExecuTorch's own MLX delegate: {problem}") for node, problem in self.differences]
        for node, reason in reasons:
            self._reasons |= dict.fromkeys(self._lowered_with.get(node, ()), reason)

    def can_lower(self, node: Node) -> bool:
        """Whether the handler of `node` can lower the node by itself, without patterns. Runs the handler."""
        is_operator = isinstance(aten_target(node.target), torch._ops.OpOverload)
        if not is_operator or self.registry.handler_for(node.target) is None:
            return False
        for operand in node.all_input_nodes:
            self._values[operand] = undelegated_slots(operand.meta.get("val"))
        self._dry_run = True
        self._clear_chains()
        self._lower_node(node, Match((node,), call_handler))
        self._check_portability()
        return self._reasons[node] is None

    def build(self) -> ProgramBuilder:
        """Lower every node and return the builder itself. Raises `Unsupported` if a node is unsupported.

        Its instructions become portable: see `portable.py`.
        """
        bind_inputs(self)
        self._lower_graph(self.program.graph_module)
        bind_outputs(self)
        for node, reason in make_portable(self).unsupported:
            raise Unsupported(f"{target_name(node.target)}: {reason}")
        return self
