"""Lowers the graph of an exported program to instructions: `Lowering`, which handlers and patterns get as `P`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..extents import expressions, memory_order
from . import dtypes
from .bind import bind_arguments
from .constant_folding import fold
from .emitter import Emitted, Emitter
from .matcher import Match
from .registry import Registry, Unsupported, target_name
from .slots import SYMBOLIC, Interface, Slot, Space, TensorSlot, ValueSlot, slot_for
from .trace import Traces


class Lowering(Emitter):
    """Lowers the nodes of a graph in the edge or the ATen dialect, each by its handler or by a pattern.

    Handlers and patterns use these methods and attributes:

    - `emit`, `constant`, `scalar`, `full`, `cast`, `size`, `item` and `chain` of `Emitter`;
    - `node` and `out`, the FX node that is being lowered and the fake value of that node;
    - `value`, `value_or_none` and `is_constant`, which look up other FX nodes;
    - `trace` and `inline`, which lower a torch function or a graph module;
    - `fresh` and `in_place_target`, which choose the slot of a result.

    Without `allow_extensions`, `emit` raises `Unsupported` for an extension. `buffer_keys` maps the names of
    the buffers that this or another method writes to their keys. They are no constants, even if this program only reads
    them.
    """

    def __init__(
        self, program: ExportedProgram, registry: Registry, *, allow_extensions: bool, buffer_keys: Mapping[str, str]
    ):
        super().__init__(allow_extensions=allow_extensions, replaced=registry.forms)
        self.program = program
        self.registry = registry
        self.buffer_keys = buffer_keys
        self.interface = Interface()
        # For each parameter, buffer or constant that was read: the data file that stores it, or None for the `.pte`.
        self.files_read: set[str | None] = set()
        self._reasons: dict[Node, str | None] = {}
        self._values: dict[Node, Any] = {}
        self._nodes_of: dict[Slot, list[Node]] = defaultdict(list)
        # The time at which an FX node reads its operands: an index in the node list of the graph that contains it.
        self._read_at: dict[Node, int] = {}
        # For the value of an FX node, the last time at which a pattern reads it outside of the operands of its nodes.
        self._also_read_at: dict[Node, int] = {}
        # The FX nodes that are being lowered, as a stack: a handler that calls `inline` lowers further nodes.
        self._lowering: list[Node] = []
        self._dry_run = False
        # For the last FX node of each match, all nodes of the match.
        self._lowered_with: dict[Node, Sequence[Node]] = {}
        inputs = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
        self._fake_mode = detect_fake_mode(inputs) or FakeTensorMode()
        self._traces = Traces(registry, self._fake_mode)

    # The walk over the graph -----------------------------------------------------------------

    def _lower_graph(self, module: GraphModule, graph: Graph | None = None) -> None:
        nodes = list((graph or module.graph).nodes)
        matches = self._find_matches(nodes)
        self._read_at |= {n: i for i, n in enumerate(nodes)}
        # The nodes of a match are lowered together, at the place of the last one.
        for last, match in matches.items():
            self._read_at |= dict.fromkeys(match.nodes, self._read_at[last])
            for n in match.reads:
                self._also_read_at[n] = max(self._read_at[last], self._also_read_at.get(n, -1))
        matched = {n for match in matches.values() for n in match.nodes}
        for node in nodes:
            if node.op == "get_attr":
                self.set_value(node, self._attribute(module, node))
            elif node.op == "call_function" and node in matches:
                self._lower_node(node, matches[node])
            elif node.op == "call_function" and node not in matched:
                self._lower_node(node, Match((node,), call_handler))
            elif node.op == "call_module":
                raise Unsupported(f"call of module {node.target}")

    def _find_matches(self, nodes: list[Node]) -> dict[Node, Match]:
        """Return the matches, by the last node of each match. No node is in two matches.

        If two matches have a node in common, the one with the later last node wins. If both have the same last node,
        the pattern that was registered earlier wins.
        """
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

    def _lower_node(self, node: Node, match: Match) -> None:
        """Lower the nodes of `match`, of which `node` is the last, and record its value and the decision about them.

        In a dry run, unsupported nodes are recorded with the reason. Otherwise `Unsupported` is raised.
        """
        self._lowering.append(node)
        depth = len(self._lowering)
        try:
            for n in match.nodes:
                dtypes.check_node(n, match.hidden or self.registry.hidden_dtypes(n.target))
            self.set_value(node, fold(node, match.lower(self, node), self._values.get, self._num_readers))
            reason = None
        except Unsupported as unsupported:
            if not self._dry_run or depth > 1:
                raise Unsupported(f"{target_name(node.target)}: {unsupported.reason}") from unsupported
            reason = unsupported.reason
            self.set_value(node, undelegated_slots(node.meta.get("val")))
        finally:
            self._lowering.pop()
        if depth == 1:
            self._reasons |= dict.fromkeys(match.nodes, reason)
            self._lowered_with[node] = match.nodes

    def _num_readers(self, slot: TensorSlot) -> int:
        """Return the number of nodes that read a value whose slot is `slot`."""
        return sum(len(node.users) for node in self._nodes_of[slot])

    def _attribute(self, module: GraphModule, node: Node) -> Any:
        """Return the value of a `get_attr` node: the slot of a constant, or a graph module."""
        value = module
        for part in node.target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            if value.ndim == 0 and not isinstance(value, FakeTensor):
                return self.scalar(value.item(), value.dtype)
            return self.constant(node.target, value)
        return value  # the graph module of a branch or a loop body

    @property
    def _origin(self) -> Node | None:
        return self._lowering[0] if self._lowering else None

    @contextmanager
    def lowering_again(self, origin: Node | None, results: dict, producers: dict) -> Iterator[list[Emitted]]:
        """`detached_chain`, for instructions that take the place of one that `origin` was lowered to."""
        self._lowering.append(origin)
        try:
            with self.detached_chain(results, producers) as new:
                yield new
        finally:
            self._lowering.pop()

    # FX nodes and their values ---------------------------------------------------------------

    @property
    def shape_env(self) -> ShapeEnv | None:
        """The symbols and guards of the program's dynamic sizes, or None if all sizes are static."""
        return self._fake_mode.shape_env

    @property
    def node(self) -> Node:
        """The FX node that is being lowered."""
        return self._lowering[-1]

    @property
    def out(self) -> Any:
        """The fake value of `node`: a tensor, a SymInt, or a list of them."""
        return self.node.meta["val"]

    def value(self, node: Node) -> Any:
        """Return the value of an FX node that has been lowered: a slot, a list of slots, a Python value or a module.

        The graph module of a branch or a loop body is the value of a `get_attr` node.
        """
        return self._values[node]

    def value_or_none(self, node: Any) -> Any:
        """Return `value(node)`, or None if `node` is not an FX node or has not been lowered yet."""
        return self._values.get(node) if isinstance(node, Node) else None

    def set_value(self, node: Node, value: Any) -> None:
        """Record `value` as the value of `node`.

        A slot without a shape gets the shape of the node's fake value, and a value slot without a symbol its symbol. A
        static shape of the fake value replaces a dynamic one. Raises TypeError if the types contradict each other.
        """
        for slot in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(slot, TensorSlot):
                self._nodes_of[slot].append(node)
        val = node.meta.get("val")
        if isinstance(value, TensorSlot) and isinstance(val, torch.Tensor):
            _check_type(node, value, val)
            is_static = all(isinstance(extent, int) for extent in val.shape)
            if value.shape is None or (is_static and value.space == Space.TEMP):
                value.shape = tuple(val.shape)
        if isinstance(value, ValueSlot) and isinstance(val, SYMBOLIC) and value.symbol is None:
            value.symbol = val
        self._values[node] = value

    def is_constant(self, node: Node) -> bool:
        """Whether `node` was lowered to a constant."""
        slot = self.value_or_none(node)
        return isinstance(slot, TensorSlot) and slot.space == Space.CONSTANT

    def fresh(self, val: Any) -> Any:
        """Return a new slot of the kind, dtype and shape of the fake value `val`."""
        return slot_for(val)

    def as_extent(self, number: int | ValueSlot) -> int | ValueSlot:
        """Return `number`, at least 1, with a symbol: functions that are traced can use it as an extent."""
        if isinstance(number, ValueSlot) and number.symbol is None:
            number.symbol = self._traces.new_extent()
        return number

    # In-place updates ------------------------------------------------------------------------

    def in_place_target(self, x: TensorSlot) -> TensorSlot | None:
        """Return `x` if the FX node that is being lowered may overwrite it, else None.

        The node may overwrite `x` if `x` is a buffer that the program writes, and the old value is neither read later
        nor returned. The result is always None in branches, loop bodies and traced functions.
        """
        if x.space != Space.BUFFER or self._chain is not self.chains[0] or len(self._lowering) > 1:
            return None
        if x.name not in self.program.graph_signature.buffers_to_mutate.values():
            return None
        now = self._read_at[self.node]
        for holder in self._nodes_of[x]:
            times = [self._read_at[user] for user in holder.users if user is not self.node]
            if max([*times, self._also_read_at.get(holder, now)]) > now:
                return None
        return x

    # Graphs within graphs --------------------------------------------------------------------

    def inline(self, module: GraphModule, arguments: Sequence[Any], graph: Graph | None = None) -> list[Any]:
        """Lower the graph of `module` into the current chain, with the values `arguments` as the inputs of the graph.

        `graph` may be a copy of that graph. Returns the values of the graph's outputs.
        """
        graph = graph or module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        for node, argument in zip(placeholders, arguments, strict=True):
            self.set_value(node, argument)
        self._lower_graph(module, graph)
        outputs = graph.output_node().args[0]
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return [self._values[n] if isinstance(n, Node) else n for n in outputs]

    def trace(self, function: Callable, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Trace a torch function and lower the resulting graph into the current chain.

        Returns the values of the function's results, as a list. See `trace.trace`.
        """
        module, graph, slots = self._traces.trace(function, args, kwargs)
        return self.inline(module, slots, graph)


def call_handler(P: Lowering, node: Node) -> Any:
    handler = P.registry.handler_for(node.target)
    if handler is None:
        raise Unsupported(P.registry.reason_for(node.target))
    return handler(P, **bind_arguments(node, P.value))


def _check_type(node: Node, slot: TensorSlot, val: torch.Tensor) -> None:
    """Raise TypeError if the type of `slot`, the value of `node`, contradicts the fake value of the node."""
    shape = val.shape if slot.shape is None else slot.shape
    static = [p for p in zip(expressions(shape), expressions(val.shape)) if all(isinstance(e, int) for e in p)]
    if slot.dtype != val.dtype or len(shape) != val.ndim or any(a != b for a, b in static):
        got, expected = (f"{dtype} {list(shape)}" for dtype, shape in ((slot.dtype, shape), (val.dtype, val.shape)))
        raise TypeError(f"{node.target}: the lowering returned {got}, expected {expected}")


def undelegated_slots(val: Any) -> Any:
    """Return new slots that stand, in a dry run, for a value that is computed outside of MLX. None stays None."""
    if isinstance(val, (list, tuple)):
        return [undelegated_slots(v) for v in val]
    if val is None:
        return None
    slot = slot_for(val)
    if isinstance(slot, TensorSlot):
        slot.space, slot.order = Space.INPUT, memory_order(val)
    return slot
