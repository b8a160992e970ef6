"""Selects the FX nodes that run on MLX: the nodes that the builder lowers in a dry run."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from . import ops, patterns  # noqa: F401  (fill the registry)
from .buffers import KEPT, SHARE_BUFFERS, State, refuse_lost_writes, shared_names, tag_owned_data
from .builder.program import ProgramBuilder
from .builder.registry import REGISTRY, aten_target, target_name
from .extents import is_same_shape
from .legalize import checked_names, legalized
from .preprocess import WEIGHTS_FILE, MLXBackend
from .serialization.portability import Problem, abbreviated
from .weights_file import check_name
from .workarounds import dynamic_sizes, nonzero
from .workarounds.checks import remove_checks
from .workarounds.return_types import register_return_types
from .workarounds.storage import read_storages

aten = torch.ops.aten

_SMALL_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Decision:
    """Whether an FX node is delegated.

    `node` is the name of the FX node, and `target` the name of the operator that the node calls. `reason` says why the
    node is not delegated; `reason` is None if the node is delegated.
    """

    node: str
    target: str
    reason: str | None


@dataclass(frozen=True)
class Difference:
    """What a delegated node, or a buffer, does on ExecuTorch's own MLX delegate that it does not do here.

    `name` is the name of the FX node or of the buffer, and `target` the name of the operator, or "buffer".
    """

    name: str
    target: str
    problem: Problem


@dataclass(frozen=True)
class KeptBuffer:
    """A mutable buffer that stays with ExecuTorch, by the name that it has in the module, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The decisions of a partitioner about every call in a program, in graph order.

    `kept_buffers` are the mutable buffers that no delegate owns. `static_dimensions` has a sentence for each dimension
    of an input that was dynamic at export and is static now. `differences` says what is not portable: what ExecuTorch's
    own MLX delegate would compute differently. It is empty with `allow_extensions`, because that delegate refuses such
    programs.

    `str(report)` is a summary for people: the number of delegated nodes, then each refused node and each kept buffer
    with its reason, the static dimensions and the differences.
    """

    decisions: tuple[Decision, ...]
    kept_buffers: tuple[KeptBuffer, ...] = ()
    static_dimensions: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()

    @property
    def delegated(self) -> int:
        """The number of delegated nodes."""
        return sum(d.reason is None for d in self.decisions)

    @property
    def refused(self) -> tuple[Decision, ...]:
        """The decisions about nodes that are not delegated."""
        return tuple(d for d in self.decisions if d.reason is not None)

    def __str__(self) -> str:
        lines = [f"{self.delegated} of {len(self.decisions)} nodes delegated to MLX"]
        lines += [f"  {d.node}  {d.target}: {d.reason}" for d in self.refused]
        lines += [f"  buffer {b.name} stays with ExecuTorch: {b.reason}. {SHARE_BUFFERS}" for b in self.kept_buffers]
        lines += [f"  {dimension}" for dimension in self.static_dimensions]
        if self.differences:
            lines.append("not portable to ExecuTorch's own MLX delegate:")
            lines += [f"  {d.name}  {d.target}: {d.problem}" for d in self.differences]
        return "\n".join(lines)


class MLXPartitioner(Partitioner):
    """Delegates every node that MLX can run. The other nodes run on ExecuTorch's own kernels.

    Pass the partitioner to `to_edge_transform_and_lower` or `to_backend`. Afterwards, `explain()` says which nodes
    were not delegated, and why.

    `allow_extensions=True` permits IR nodes that ExecuTorch's own MLX delegate lacks. More operators are delegated,
    but only this delegate can run the program.

    `portable=True` refuses what ExecuTorch's own MLX delegate would compute differently. Such a node is not delegated.
    Lowering raises RuntimeError if no such decision helps: if methods share a buffer, for example. Without it, the
    nodes are delegated, and the report names them. docs/interop.md explains the differences.

    `weights_file` is the name of a data file, such as `model.ptd`, which gets all constants and initial values of
    buffers of at least 4 KB in place of the `.pte`: see weights_file.py.

    `legalize` names passes that replace tensors of a dtype that MLX lacks by pairs of tensors: "complex" by their real
    and their imaginary part, and "float64" by sums of two float32 tensors, which have 48 bits of precision and the
    range of float32. The passes run in `to_edge_transform_and_lower`.
    """

    def __init__(
        self,
        *,
        allow_extensions: bool = False,
        portable: bool = False,
        weights_file: str | None = None,
        legalize: Collection[str] = (),
    ) -> None:
        super().__init__()
        if allow_extensions and portable:
            raise ValueError("MLXPartitioner: got allow_extensions and portable, expected at most one of them")
        self._legalize = checked_names(legalize)
        self._options: dict[str, Any] = {"allow_extensions": allow_extensions, "portable": portable}
        specs = [CompileSpec(key, b"") for key, is_set in self._options.items() if is_set]
        if weights_file is not None:
            check_name(weights_file)
            specs.append(CompileSpec(WEIGHTS_FILE, weights_file.encode()))
        self.delegation_spec = DelegationSpec(MLXBackend.__name__, specs)
        self._reports: list[Report] = []
        self._states: list[State] = []

    def explain(self) -> Report:
        """Return the decision about every FX node of every graph that was partitioned so far.

        Raises RuntimeError before the first graph is partitioned.
        """
        if not self._reports:
            raise RuntimeError("explain: this partitioner has not partitioned a program yet")
        differences = [d for report in self._reports for d in report.differences]
        if not self._options["allow_extensions"] and (shared := shared_names(self._states)):
            differences.append(Difference(abbreviated(shared), "buffer", Problem("shared_state", "of this program")))
        return Report(
            tuple(d for report in self._reports for d in report.decisions),
            tuple(b for report in self._reports for b in report.kept_buffers),
            tuple(d for report in self._reports for d in report.static_dimensions),
            tuple(differences),
        )

    # The interface of ExecuTorch's partitioners ----------------------------------------------

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Give the nodes and the data that go to MLX a delegation tag, in place, and record the report.

        Returns the same program with the tags and the delegate of each tag.
        """
        register_return_types()
        refuse_lost_writes(exported_program)
        static = tuple(dynamic_sizes.static_dimensions(exported_program))
        for dimension in static:
            warnings.warn(dimension, UserWarning, stacklevel=2)
        builder = ProgramBuilder(exported_program, **self._options)
        reasons = builder.check()
        _refuse_users_of_nonzero(reasons)
        partitions = _decide_partitions(exported_program.graph_module, reasons)
        tags = {}
        for index, partition in enumerate(partitions):
            nodes = [n for n in partition if n.op == "call_function"]
            if all(_computes_no_tensor(n) for n in nodes):
                continue  # sizes and assertions alone are not worth a delegate call
            tag = f"mlx_{index}"
            for node in nodes:
                node.meta["delegation_tag"] = tag
            tags[tag] = self.delegation_spec
        _tag_submodules(exported_program)
        kept = tag_owned_data(exported_program, reasons)
        KEPT.add(exported_program, kept)
        decisions = tuple(Decision(n.name, target_name(n.target), r) for n, r in reasons.items())
        mutable = set(exported_program.graph_signature.buffers_to_mutate.values())
        kept_buffers = tuple(KeptBuffer(name, reason) for name, reason in kept.items() if name in mutable)
        differences = tuple(
            Difference(node.name, target_name(node.target), problem)
            for node, problem in builder.differences
            if node is not None and reasons[node] is None
        )
        self._reports.append(Report(decisions, kept_buffers, static, differences))
        self._states.append(State.of(exported_program))
        # ExecuTorch removes the data that a delegate owns from `_constants`. The caller's program may share that
        # dictionary, so the partitioned program gets a copy.
        exported_program._constants = dict(exported_program.constants)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[Node], bool] | None]:
        """Return the operators to preserve: each has a handler that can lower all of its calls in the program.

        The second result, ExecuTorch's filter of nodes, is None.
        """
        targets = self.lowered_targets(ep)
        return list(targets - self._targets_in_undelegated_bodies(ep, targets)), None

    def lowered_targets(self, program: ExportedProgram) -> set[torch._ops.OpOverload]:
        """Return the operators with a handler that can lower all of their calls, if MLX gets all nodes of `program`."""
        return self._targets_to_lower(program, REGISTRY.ops_to_preserve())

    def _targets_in_undelegated_bodies(self, program: ExportedProgram, targets: set) -> set:
        """Return the members of `targets` in branches and loop bodies that ExecuTorch will run.

        ExecuTorch has no kernels for most of them. Which nodes are delegated is known only after decomposition. The
        bodies of a `while_loop` are left out: ExecuTorch neither decomposes nor runs them.
        """
        if not any(n.target in targets for n in _calls(program) if n.graph is not program.graph):
            return set()
        table = {t: f for t, f in default_decompositions().items() if t not in targets}
        decomposed = program.run_decompositions(table)
        reasons = ProgramBuilder(decomposed, **self._options).check()
        bodies = (
            getattr(decomposed.graph_module, operand.target)
            for node, reason in reasons.items()
            if reason is not None and node.target is not torch.ops.higher_order.while_loop
            for operand in node.all_input_nodes
            if operand.op == "get_attr"
        )
        return {n.target for body in bodies if isinstance(body, GraphModule) for n in _calls_in(body)} & targets

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Decompose the operators of `REGISTRY.decompositions`, which have no IR node, of `nonzero` and of
        `dynamic_sizes`.

        Some of them are not core ATen operators, and ExecuTorch's verifier would refuse them. Returns the decomposed
        program, or `exported_program` itself if it calls no such operator. Also removes the checks of `remove_checks`
        from `exported_program`, and inserts nodes into it: see `_keep_dtypes`, `_prepare_copies` and
        `_clone_returned_buffers`. Changes the operands of `as_strided`, see `read_storages`.

        Runs the passes of `legalize` before.
        """
        remove_checks(exported_program)
        read_storages(exported_program)
        exported_program = legalized(exported_program, self._legalize)
        _keep_dtypes(exported_program)
        _prepare_copies(exported_program)
        _clone_returned_buffers(exported_program)
        for module in _graph_modules(exported_program.graph_module):
            module.recompile()
        decompositions = REGISTRY.decompositions
        called = {n.target for n in _calls(exported_program) if n.target in decompositions}
        table = {target: decompositions[target] for target in self._targets_to_lower(exported_program, called)}
        if any(n.target in nonzero.DECOMPOSITIONS for n in _calls(exported_program)):
            table |= nonzero.DECOMPOSITIONS
        table |= dynamic_sizes.decompositions(_calls(exported_program))
        return exported_program.run_decompositions(table) if table else exported_program

    def _targets_to_lower(self, program: ExportedProgram, targets: Iterable) -> set[torch._ops.OpOverload]:
        """Return the members of `targets` for which the builder can lower every call in the program."""
        builder = ProgramBuilder(program, **self._options)
        remaining = set(targets)
        for node in _calls(program):
            if node.target in remaining and not builder.can_lower(node):
                remaining.discard(node.target)
        return remaining


def _keep_dtypes(program: ExportedProgram) -> None:
    """Replace the Python numbers that operators take as tensors by tensors, in operators whose result is 0-d.

    ExecuTorch would replace them by 0-d tensors of int64 or float32, and the result would have that dtype too.
    """
    for node in list(_calls(program)):
        result = node.meta.get("val")
        is_number = isinstance(result, torch.Tensor) and result.ndim == 0
        if not is_number or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for index, (number, argument) in enumerate(zip(node.args, node.target._schema.arguments)):
            if isinstance(argument.type, torch.TensorType) and _would_widen(number, result.dtype):
                with node.graph.inserting_before(node):
                    # Unlike `full`, the builder does not round it.
                    tensor = node.graph.call_function(aten.scalar_tensor.default, (number,), {"dtype": result.dtype})
                tensor.meta = dict(node.meta)
                node.update_arg(index, tensor)


def _would_widen(number: object, dtype: torch.dtype) -> bool:
    """Whether `number`, as a 0-d tensor of its own dtype, would widen a result of `dtype`.

    False for an integer beyond the range of `dtype`, which a tensor of `dtype` cannot hold.
    """
    if dtype in _SMALL_INTEGERS:
        limits = torch.iinfo(dtype)
        return type(number) is int and limits.min <= number <= limits.max
    return dtype in _HALVES and type(number) is float


def _prepare_copies(program: ExportedProgram) -> None:
    """Make each `a.copy_(b)` compute a new value of the shape and dtype of `a`.

    For a buffer `a`, torch.export takes `b` itself for the new value. Three cases need a node before the copy:

    - `b` has another dtype, and is cast.
    - `b` has another shape, and is expanded.
    - `b` is an input of the graph, or a view of one, and is cloned. Otherwise, no node would compute the new value of
      `a` if the views change nothing. If `b` is a buffer, ExecuTorch would then take the new value for one that was
      written in place, and `a` would keep its old value.
    """
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, source = node.args[:2]
        expected = target.meta["val"]
        if source.meta["val"].dtype != expected.dtype:
            source = _insert(node, aten._to_copy.default, source, dtype=expected.dtype)
        if not is_same_shape(source.meta["val"].shape, expected.shape):
            source = _insert(node, aten.expand.default, source, list(expected.shape))
        elif _origin(source).op == "placeholder":
            source = _insert(node, aten.clone.default, source)
        node.args = (target, source, *node.args[2:])


def _clone_returned_buffers(program: ExportedProgram) -> None:
    """Let the program return a clone of each buffer, and of each value that it copies into a buffer.

    Otherwise, the new value of the buffer would be an output of the program, and no delegate could own the buffer.
    """
    graph, specs = program.graph, program.graph_signature.output_specs
    output = graph.output_node()
    results = list(output.args[0])
    buffers = {n for n in graph.find_nodes(op="placeholder") if n.name in program.graph_signature.inputs_to_buffers}
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    values = buffers | {_origin(node.args[1]) for node in copies if _origin(node.args[0]) in buffers}
    values |= {value for spec, value in zip(specs, results) if spec.kind == OutputKind.BUFFER_MUTATION}
    returned = [
        index
        for index, (spec, value) in enumerate(zip(specs, results, strict=True))
        if spec.kind == OutputKind.USER_OUTPUT and isinstance(value, Node) and _origin(value) in values
    ]
    for index in returned:
        results[index] = _insert(output, aten.clone.default, results[index])
        specs[index].arg.name = results[index].name
    output.args = (tuple(results),)


def _insert(before: Node, target: torch._ops.OpOverload, x: Node, *args, **kwargs) -> Node:
    """Insert a call of `target` with `x` as first argument. Returns the new node."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, (x, *args), kwargs)
    node.meta = x.meta | {"val": target(x.meta["val"], *args, **kwargs)}
    return node


def _origin(node: Node) -> Node:
    """Return the node whose memory `node` has: the first of a chain of views and writes in place, or `node` itself."""
    while node.op == "call_function" and _shares_memory(node.target):
        node = node.args[0]
    return node


def _shares_memory(target: object) -> bool:
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else []
    return len(returns) == 1 and returns[0].alias_info is not None


def _calls(program: ExportedProgram) -> Iterator[Node]:
    """Yield the call nodes of the program's graph and of the graphs of its branches and loop bodies."""
    yield from _calls_in(program.graph_module)


def _calls_in(module: GraphModule) -> Iterator[Node]:
    for inner in _graph_modules(module):
        yield from (n for n in inner.graph.nodes if n.op == "call_function")


def _graph_modules(module: GraphModule) -> Iterator[GraphModule]:
    """Yield a module and the modules of its branches and loop bodies."""
    return (inner for inner in module.modules() if isinstance(inner, GraphModule))


def _refuse_users_of_nonzero(reasons: dict[Node, str | None]) -> None:
    """Add a reason for each node that reads a result of `nonzero` that is not in the order that ExecuTorch says.

    There are such results only if `transform_for_pre_decomposition` has not run.
    """
    reason = "ExecuTorch writes the result of nonzero in another order than it says; use to_edge_transform_and_lower"
    for node in reasons:
        operands = (n for n in node.all_input_nodes if aten_target(n.target) is aten.nonzero.default)
        if not _computes_no_tensor(node) and any(operand.meta["val"].shape[1] > 1 for operand in operands):
            reasons[node] = reason


def _decide_partitions(module: GraphModule, reasons: dict[Node, str | None]) -> list[Iterable[Node]]:
    """Return the groups of nodes that can each be computed in one call of a delegate.

    `reasons` maps each call node to the reason why it is unsupported, or to None. Adds a reason for each condition that
    another group, ExecuTorch or the caller reads, because a delegate call cannot return a condition.
    """
    while True:
        partitions = _partitions(module, {n for n, reason in reasons.items() if reason is None})
        returned = [
            n
            for partition in partitions
            for n in partition
            if isinstance(n.meta.get("val"), torch.SymBool) and any(user not in partition for user in n.users)
        ]
        if not returned:
            return partitions
        reasons |= dict.fromkeys(returned, "a condition that is read outside of the delegate is unsupported")


def _partitions(module: GraphModule, supported: set[Node]) -> list[Iterable[Node]]:
    """Return the groups of supported nodes that can each be computed in one call of a delegate."""
    if all(n in supported for n in module.graph.nodes if n.op == "call_function"):
        return [supported]  # the general search for cycles takes long
    support = _SupportedNodes(supported)
    partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
    return [partition.nodes for partition in partitioner.propose_partitions()]


class _SupportedNodes(OperatorSupportBase):
    def __init__(self, nodes: set[Node]):
        self.nodes = nodes

    def is_node_supported(self, submodules: object, node: Node) -> bool:
        return node in self.nodes


def _computes_no_tensor(node: Node) -> bool:
    return node.target is operator.getitem or not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))


def _tag_submodules(program: ExportedProgram) -> None:
    """Give the branches of a delegated `cond`, and the bodies of a delegated loop, the tag of that node."""
    for node in program.graph.nodes:
        if node.op == "get_attr":
            tags = {user.meta.get("delegation_tag") for user in node.users}
            if len(tags) == 1 and None not in tags:
                node.meta["delegation_tag"] = tags.pop()
