"""Which nodes go to MLX: those that a dry run of the builder can lower."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from . import ops as _  # noqa: F401  (fills the registry)
from .builder.program import ProgramBuilder
from .builder.registry import REGISTRY, aten_target
from .preprocess import OWN_NODES, MLXBackend
from .return_types import give_names

give_names()


@dataclass(frozen=True)
class Decision:
    """What became of one call. `reason` is None where it was delegated."""

    node: str
    target: str
    reason: str | None


@dataclass(frozen=True)
class Report:
    """The decisions of the last `partition`, in graph order."""

    decisions: tuple[Decision, ...]

    @property
    def delegated(self) -> int:
        return sum(d.reason is None for d in self.decisions)

    @property
    def refused(self) -> tuple[Decision, ...]:
        return tuple(d for d in self.decisions if d.reason is not None)

    def __str__(self) -> str:
        lines = [f"{self.delegated} of {len(self.decisions)} nodes delegated to MLX"]
        lines += [f"  {d.node}  {d.target}: {d.reason}" for d in self.refused]
        return "\n".join(lines)


class MLXPartitioner(Partitioner):
    """Delegates to MLX everything that lowers; the rest runs on ExecuTorch's own kernels.

    With `own_nodes` it may use nodes that ExecuTorch's own MLX delegate lacks: more lowers, and the
    program runs with this delegate only. `explain()` tells, after lowering, what stayed behind and
    why.
    """

    def __init__(self, *, own_nodes: bool = False) -> None:
        super().__init__()
        self._own_nodes = own_nodes
        specs = [CompileSpec(OWN_NODES, b"")] if own_nodes else []
        self.delegation_spec = DelegationSpec(MLXBackend.__name__, specs)
        self._reports: list[Report] = []

    def explain(self) -> Report:
        """The decisions of every graph partitioned so far, as one report."""
        if not self._reports:
            raise RuntimeError("explain: this partitioner has not partitioned a program yet")
        return Report(tuple(d for report in self._reports for d in report.decisions))

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        reasons = ProgramBuilder(exported_program, own_nodes=self._own_nodes).check()
        self._reports.append(
            Report(
                tuple(Decision(n.name, str(aten_target(n.target)), r) for n, r in reasons.items())
            )
        )
        partitions = CapabilityBasedPartitioner(
            exported_program.graph_module,
            _Supported({n for n, reason in reasons.items() if reason is None}),
            allows_single_node_partition=True,
        ).propose_partitions()
        tags = {}
        for index, partition in enumerate(partitions):
            nodes = [n for n in partition.nodes if n.op == "call_function"]
            if all(_is_bookkeeping(n) for n in nodes):
                continue
            tag = f"mlx_{index}"
            for node in nodes:
                node.meta["delegation_tag"] = tag
            tags[tag] = self.delegation_spec
        _tag_submodules(exported_program)
        _tag_owned_data(exported_program)
        # ExecuTorch takes what a delegate owns out of this dictionary, which is also the caller's.
        exported_program._constants = dict(exported_program.constants)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[Node], bool] | None]:
        """Operators with a lowering of their own stay whole, unless it turns down one of their
        calls in this program: then that one has to be taken apart, and with it all of them."""
        return list(self._that_lower(ep, REGISTRY.decomposable())), None

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Spells out what has no node and is not of the core ATen set either: ExecuTorch's verifier
        would refuse it."""
        texts = REGISTRY.texts
        called = {n.target for n in _calls(exported_program) if n.target in texts}
        spelled = self._that_lower(exported_program, called)
        if not spelled:
            return exported_program
        return exported_program.run_decompositions({target: texts[target] for target in spelled})

    def _that_lower(self, ep: ExportedProgram, targets: Iterable) -> set[torch._ops.OpOverload]:
        """Those of which no call in the program is turned down."""
        builder = ProgramBuilder(ep, own_nodes=self._own_nodes)
        good = set(targets)
        for node in _calls(ep):
            if node.target in good and not builder.lowers_alone(node):
                good.discard(node.target)
        return good


def _calls(program: ExportedProgram) -> Iterator[Node]:
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (n for n in module.graph.nodes if n.op == "call_function")


class _Supported(OperatorSupportBase):
    def __init__(self, nodes: set[Node]):
        self.nodes = nodes

    def is_node_supported(self, submodules: object, node: Node) -> bool:
        return node in self.nodes


def _is_bookkeeping(node: Node) -> bool:
    """Sizes and assertions alone are not worth a delegate call."""
    return not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)) or (
        node.target is operator.getitem
    )


def _tag_submodules(program: ExportedProgram) -> None:
    """The branches of a delegated `cond` go with it."""
    for node in program.graph.nodes:
        if node.op == "get_attr":
            tags = {user.meta.get("delegation_tag") for user in node.users}
            if len(tags) == 1 and None not in tags:
                node.meta["delegation_tag"] = tags.pop()


def _tag_owned_data(program: ExportedProgram) -> None:
    """Parameters, constants and buffers belong to the delegate that alone uses them.

    A buffer that is written must also be written by that delegate, and its new value read by
    nobody else, nor returned as it is; one for which this does not hold stays with ExecuTorch
    and travels as an argument.
    """
    signature = program.graph_signature
    data = {
        *signature.inputs_to_parameters,
        *signature.inputs_to_buffers,
        *signature.inputs_to_lifted_tensor_constants,
    }
    written_by = {target: name for name, target in signature.buffers_to_mutate.items()}
    nodes = {n.name: n for n in program.graph.nodes}
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in data:
            continue
        tags = {user.meta.get("delegation_tag") for user in node.users if user.op != "output"}
        writer = written_by.get(signature.inputs_to_buffers.get(node.name))
        if writer is not None:
            tags.add(nodes[writer].meta.get("delegation_tag"))
            readers = (user for user in nodes[writer].users if user.op != "output")
            tags |= {user.meta.get("delegation_tag") for user in readers}
            tags |= {None} if writer in signature.user_outputs else set()
            tags |= {None for user in node.users if user.op == "output"}
        if len(tags) == 1 and None not in tags:
            node.meta["delegation_tag"] = tags.pop()
