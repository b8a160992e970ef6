"""Lowers the graph of an exported program to instructions.

`ProgramBuilder` walks the graph and calls the handler of each FX node. The partitioner uses the walk as a dry run
(`check`), the backend to compile (`build`). `assemble` turns the result into a program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Node

from . import dtypes
from .bind import bind_arguments
from .constant_folding import fold
from .emitter import Emitter
from .interface import Interface, bind_inputs, bind_outputs
from .matcher import Match, is_call
from .quantized_weights import DEQUANTIZE
from .registry import REGISTRY, Registry, Unsupported, aten_target
from .slots import Slot, Space, TensorSlot, slot_for
from .trace import trace


class ProgramBuilder(Emitter):
    """Lowers the graph of `program`, in the edge or the ATen dialect.

    Handlers and patterns get the builder as `P`. They use

    - `emit`, `constant`, `scalar`, `full`, `cast`, `size`, `item` and `chain` of `Emitter`;
    - `node` and `out`, the FX node being lowered and its fake value;
    - `value`, `value_or_none` and `is_constant`, which look up other FX nodes;
    - `trace` and `inline`, which lower a torch function or a graph module;
    - `fresh` and `in_place`, which choose the slot of a result.

    Without `allow_extensions` a node that needs an extension is `Unsupported`.
    """

    def __init__(
        self, program: ExportedProgram, registry: Registry = REGISTRY, *, allow_extensions: bool = False
    ):
        super().__init__(allow_extensions=allow_extensions)
        self.program = program
        self.registry = registry
        self.interface = Interface()
        self._reasons: dict[Node, str | None] = {}
        self._values: dict[Node, Any] = {}
        self._nodes_of: dict[Slot, list[Node]] = defaultdict(list)
        self._read_at: dict[Node, int] = {}  # when an FX node reads its operands, as an index in its graph
        self._lowering: list[Node] = []  # stack: the last is being lowered, the handlers of the others called `inline`
        self._dry_run = False
        self._fake_mode = detect_fake_mode(
            [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
        )

    # The walk over the graph -----------------------------------------------------------------

    def check(self) -> dict[Node, str | None]:
        """Dry run, which reads no constant: for every call in the graph, None if it lowers, else the reason."""
        self._dry_run = True
        bind_inputs(self)
        self._lower_graph(self.program.graph_module)
        return self._reasons

    def can_lower(self, node: Node) -> bool:
        """Dry run of a single call, without patterns."""
        is_operator = isinstance(aten_target(node.target), torch._ops.OpOverload)
        if not is_operator or self.registry.handler_for(node.target) is None:
            return False
        for operand in node.all_input_nodes:
            self._values[operand] = _undelegated(operand.meta.get("val"))
        self._dry_run = True
        self._lower_node(node, _call_handler, [node])
        return self._reasons[node] is None

    def build(self) -> ProgramBuilder:
        """Lower every node. Raises `Unsupported` if one does not lower."""
        bind_inputs(self)
        self._lower_graph(self.program.graph_module)
        bind_outputs(self)
        return self

    def _lower_graph(self, module: GraphModule) -> None:
        nodes = list(module.graph.nodes)
        matches = self._find_matches(nodes)
        self._read_at |= {n: i for i, n in enumerate(nodes)}
        # The nodes of a match lower together, at the place of the last one.
        for last, match in matches.items():
            self._read_at |= {n: self._read_at[last] for n in match.nodes}
        matched = {n for match in matches.values() for n in match.nodes}
        for node in nodes:
            if node.op == "get_attr":
                self.set_value(node, self._attribute(module, node))
            elif node.op == "call_function" and node in matches:
                self._lower_node(node, matches[node].lower, matches[node].nodes)
            elif node.op == "call_function" and node not in matched:
                self._lower_node(node, _call_handler, [node])
            elif node.op == "call_module":
                raise Unsupported(f"call of module {node.target}")

    def _find_matches(self, nodes: list[Node]) -> dict[Node, Match]:
        """The patterns that match, by their last node. Later nodes and earlier patterns take precedence."""
        matches, matched = {}, set()
        for node in reversed(nodes):
            if node.op != "call_function" or node in matched:
                continue
            for pattern in self.registry.patterns:
                match = pattern(self, node)
                if match is not None and matched.isdisjoint(match.nodes):
                    matches[node] = match
                    matched.update(match.nodes)
                    break
        return matches

    def _lower_node(self, node: Node, handler: Callable, covered: Sequence[Node]) -> None:
        """Lower `node`, and with it the other nodes that a pattern covers."""
        self._lowering.append(node)
        depth = len(self._lowering)
        try:
            for n in covered:
                dtypes.check_node(n, allow_byte_floats=is_call(n, *DEQUANTIZE))
            self.set_value(node, fold(node, handler(self, node), self._values.get))
            reason = None
        except Unsupported as unsupported:
            if not self._dry_run or depth > 1:
                raise Unsupported(f"{node.target}: {unsupported.reason}") from unsupported
            reason = unsupported.reason
            self.set_value(node, _undelegated(node.meta.get("val")))
        finally:
            self._lowering.pop()
        if depth == 1:
            self._reasons |= {n: reason for n in covered}

    def _attribute(self, module: GraphModule, node: Node) -> Any:
        value = module
        for part in node.target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            if value.ndim == 0 and not isinstance(value, FakeTensor):
                return self.scalar(value.item(), value.dtype)
            return self.constant(node.target, value)
        return value  # the graph module of a branch or a loop body

    # FX nodes and their values ---------------------------------------------------------------

    @property
    def node(self) -> Node:
        """The FX node being lowered."""
        return self._lowering[-1]

    @property
    def out(self) -> Any:
        """The fake value of `node`: a tensor, a SymInt, or a list of them."""
        return self.node.meta["val"]

    def value(self, node: Node) -> Any:
        """What `node` was lowered to: a slot, a list of slots, a Python value or a graph module."""
        return self._values[node]

    def value_or_none(self, node: Any) -> Any:
        """The same, or None if `node` is not an FX node or is not lowered yet."""
        return self._values.get(node) if isinstance(node, Node) else None

    def set_value(self, node: Node, value: Any) -> None:
        """Record what `node` was lowered to."""
        for slot in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(slot, TensorSlot):
                self._nodes_of[slot].append(node)
        val = node.meta.get("val")
        if isinstance(value, TensorSlot) and isinstance(val, torch.Tensor) and value.shape is None:
            value.shape = tuple(val.shape)
        self._values[node] = value

    def is_constant(self, node: Node) -> bool:
        slot = self.value_or_none(node)
        return isinstance(slot, TensorSlot) and slot.space == Space.CONSTANT

    def fresh(self, val: Any) -> Slot:
        """A new slot for a value like the fake value `val`."""
        return slot_for(val)

    # In-place updates ------------------------------------------------------------------------

    def in_place(self, x: TensorSlot) -> TensorSlot | None:
        """`x` if it is a buffer that this node may overwrite, because nothing reads its old value later; else None."""
        if x.space != Space.BUFFER or self._chain is not self.chains[0] or len(self._lowering) > 1:
            return None
        now = self._read_at[self.node]
        for holder in self._nodes_of[x]:
            for user in holder.users:
                if user is not self.node and self._read_at[user] > now and not (
                    user.op == "output" and self._is_only_written_back(holder)
                ):
                    return None
        return x

    def _is_only_written_back(self, node: Node) -> bool:
        """Whether the outputs of the graph that are `node` all update a buffer."""
        specs = self.program.graph_signature.output_specs
        kinds = [s.kind for s in specs if getattr(s.arg, "name", None) == node.name]
        return all(kind == OutputKind.BUFFER_MUTATION for kind in kinds)

    # Graphs within graphs --------------------------------------------------------------------

    def inline(self, module: GraphModule, arguments: Sequence[Any]) -> list[Any]:
        """Lower the graph of `module` at this point, with `arguments` as its inputs. Returns its outputs."""
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        for node, argument in zip(placeholders, arguments, strict=True):
            self.set_value(node, argument)
        self._lower_graph(module)
        outputs = module.graph.output_node().args[0]
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return [self._values[n] if isinstance(n, Node) else n for n in outputs]

    def trace(self, function: Callable, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Trace a torch function and lower the graph at this point. Returns its outputs. See `trace.trace`."""
        return self.inline(*trace(self.registry, self._fake_mode, function, args, kwargs))


def _call_handler(P: ProgramBuilder, node: Node) -> Any:
    handler = P.registry.handler_for(node.target)
    if handler is None:
        raise Unsupported("no lowering for this operator")
    return handler(P, **bind_arguments(node, P.value))


def _undelegated(val: Any) -> Any:
    """Slots that stand for values computed outside of MLX, in a dry run."""
    if isinstance(val, (list, tuple)):
        return [_undelegated(v) for v in val]
    return None if val is None else slot_for(val)
