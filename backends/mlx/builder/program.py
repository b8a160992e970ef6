"""The builder: walks an exported program, asks handlers, collects instructions.

The same walk serves the partitioner (`check`, a dry run that reads no constant) and the
backend (`build`). Slots get their numbers at the very end, in `assemble`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import GraphModule, Node

from ..serialization import ir
from ..serialization.generate import FIRST_OWN_OP
from . import dtypes
from .bind import bind_arguments
from .known import folded
from .patterns import is_call
from .peephole import simplified
from .quantized import DEQUANTIZE
from .registry import REGISTRY, Registry, Unsupported, aten_target
from .slots import Slot, Space, TensorSlot, ValueSlot, slot_for
from .trace import trace


@dataclass
class Emitted:
    """An instruction whose operands are still slots."""

    op: type[ir.Op]
    fields: dict[str, Any]


@dataclass
class Interface:
    """The slots a delegate call is wired to, in the order of its arguments."""

    inputs: list[Slot] = field(default_factory=list)
    outputs: list[Slot] = field(default_factory=list)
    buffers: list[TensorSlot] = field(default_factory=list)


class ProgramBuilder:
    """Lowers the graph of `program` (edge or ATen dialect); with `own_nodes` also to nodes that
    ExecuTorch's own MLX delegate lacks.

    Handlers use: `emit`, `constant`, `scalar`, `cast`, `size`, `item`, `trace`, `inline`,
    `chain`, `in_place`, and `out`, the fake value of the node being lowered.
    """

    def __init__(
        self, program: ExportedProgram, registry: Registry = REGISTRY, *, own_nodes: bool = False
    ):
        self.program = program
        self.own_nodes = own_nodes
        self.registry = registry
        self.chains: list[list[Emitted]] = [[]]
        self.interface = Interface()
        self.reasons: dict[Node, str | None] = {}
        self._chain = self.chains[0]
        self._env: dict[Node, Any] = {}
        self._holders: dict[Slot, list[Node]] = defaultdict(list)
        self._position: dict[Node, int] = {}
        self._nodes: list[Node] = []
        self._dry = False
        self._scalars: dict[tuple, TensorSlot] = {}
        # Instructions already emitted, one table for each open chain: what an outer chain has
        # computed an inner one may use, but not the other way round.
        self._known: list[dict[tuple, Any]] = [{}]
        self._made: dict[Slot, Emitted] = {}
        self._fake_mode = detect_fake_mode(
            [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
        )

    # -- the two walks --------------------------------------------------------

    def check(self) -> dict[Node, str | None]:
        """Dry run: for every call in the graph, None if it lowers, else the reason why not."""
        self._dry = True
        self._bind_inputs()
        self._run(self.program.graph_module)
        return self.reasons

    def lowers_alone(self, node: Node) -> bool:
        """Dry run of one call, its operands given."""
        is_operator = isinstance(aten_target(node.target), torch._ops.OpOverload)
        if not is_operator or self.registry.find(node.target) is None:
            return False
        for operand in node.all_input_nodes:
            self._env[operand] = _external(operand.meta.get("val"))
        self._dry = True
        self._lower(node, self._call, [node])
        return self.reasons[node] is None

    def build(self) -> ProgramBuilder:
        """Lower every node; `Unsupported` if one of them does not."""
        self._bind_inputs()
        self._run(self.program.graph_module)
        self._bind_outputs()
        return self

    def _run(self, module: GraphModule) -> None:
        nodes = list(module.graph.nodes)
        matches, position = self._match(nodes)
        self._position |= position
        claimed = {n: m for m in matches.values() for n in m.nodes}
        for node in nodes:
            if node.op == "get_attr":
                self._set(node, self._attribute(module, node))
            elif node.op == "call_function" and node in matches:
                self._lower(node, matches[node].lower, matches[node].nodes)
            elif node.op == "call_function" and node not in claimed:
                self._lower(node, self._call, [node])
            elif node.op == "call_module":
                raise Unsupported(f"call of module {node.target}")

    def _match(self, nodes: list[Node]) -> tuple[dict[Node, Any], dict[Node, int]]:
        """Patterns by their last node, and when each node is really read: a node inside a
        pattern reads its inputs where the pattern's last node stands."""
        position = {n: i for i, n in enumerate(nodes)}
        matches, claimed = {}, set()
        for node in reversed(nodes):
            if node.op != "call_function" or node in claimed:
                continue
            for match in self.registry.patterns:
                found = match(self, node)
                if found is not None and claimed.isdisjoint(found.nodes):
                    matches[node] = found
                    claimed.update(found.nodes)
                    position |= {n: position[node] for n in found.nodes}
                    break
        return matches, position

    def _lower(self, node: Node, handler: Callable, covered: Sequence[Node]) -> None:
        self._nodes.append(node)
        depth = len(self._nodes)
        try:
            for n in covered:
                dtypes.check_node(n, bytes_are_enough=is_call(n, *DEQUANTIZE))
            self._set(node, folded(node, handler(self, node), self._env.get))
            reason = None
        except Unsupported as unsupported:
            if not self._dry or depth > 1:
                raise Unsupported(f"{node.target}: {unsupported.reason}") from unsupported
            reason = unsupported.reason
            self._set(node, _external(node.meta.get("val")))
        finally:
            self._nodes.pop()
        if depth == 1:
            self.reasons |= {n: reason for n in covered}

    @staticmethod
    def _call(P: ProgramBuilder, node: Node) -> Any:
        handler = P.registry.find(node.target)
        if handler is None:
            raise Unsupported("no lowering for this operator")
        return handler(P, **bind_arguments(node, P._env.__getitem__))

    def _set(self, node: Node, value: Any) -> None:
        for slot in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(slot, TensorSlot):
                self._holders[slot].append(node)
        val = node.meta.get("val")
        if isinstance(value, TensorSlot) and isinstance(val, torch.Tensor) and value.shape is None:
            value.shape = tuple(val.shape)
        self._env[node] = value

    # -- inputs and outputs ---------------------------------------------------

    def _bind_inputs(self) -> None:
        signature = self.program.graph_signature
        mutated = set(signature.buffers_to_mutate.values())
        placeholders = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        for spec in signature.input_specs:
            node = placeholders[spec.arg.name]
            if spec.kind == InputKind.USER_INPUT:
                if isinstance(spec.arg, ConstantArgument):
                    self._set(node, spec.arg.value)
                    continue
                slot = slot_for(node.meta["val"])
                if isinstance(slot, TensorSlot):
                    slot.space, slot.name = Space.INPUT, node.name
                else:
                    slot.is_input = True
                self.interface.inputs.append(slot)
            elif spec.target not in mutated and (value := self._number(spec)) is not None:
                slot = self.scalar(value.item(), value.dtype)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                is_buffer = spec.kind == InputKind.BUFFER and spec.target in mutated
                slot = slot_for(
                    node.meta["val"],
                    space=Space.BUFFER if is_buffer else Space.CONSTANT,
                    name=spec.target,
                    data=self._tensor_getter(spec.target),
                )
                if is_buffer:
                    self.interface.buffers.append(slot)
            else:
                slot = None  # tokens and custom objects: no value of ours
            self._set(node, slot)

    def _number(self, spec: Any) -> torch.Tensor | None:
        """A number of the source text: export makes it a constant, or a buffer without state."""
        if spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            return None
        stores = (self.program.state_dict, self.program.constants)
        value = next((store[spec.target] for store in stores if spec.target in store), None)
        plain = isinstance(value, torch.Tensor) and value.ndim == 0
        return value if plain and not isinstance(value, FakeTensor) else None

    def _tensor_getter(self, target: str) -> Callable[[], torch.Tensor]:
        def get() -> torch.Tensor:
            for store in (self.program.state_dict, self.program.constants):
                if target in store:
                    return store[target]
            raise KeyError(f"{target} is in neither the state dict nor the constants")

        return get

    def _bind_outputs(self) -> None:
        signature = self.program.graph_signature
        values = self.program.graph.output_node().args[0]
        by_name = {n.name: n for n in values if isinstance(n, Node)}
        buffers = {b.name: b for b in self.interface.buffers}
        user_outputs = []
        for spec in signature.output_specs:
            if spec.kind == OutputKind.USER_OUTPUT:
                user_outputs.append(self._env[by_name[spec.arg.name]])
            elif spec.kind != OutputKind.BUFFER_MUTATION:
                raise Unsupported(f"output of kind {spec.kind.name}")
        # Outputs first: an output may be the old value of a buffer that is written below.
        for slot in user_outputs:
            if isinstance(slot, TensorSlot):
                if slot.space != Space.TEMP:
                    shape = slot.shape
                    slot = self.emit(ir.IdCopyNode, x=slot, out=TensorSlot(slot.dtype, shape))
                slot.space = Space.OUTPUT
            self.interface.outputs.append(slot)
        for spec in signature.output_specs:
            if spec.kind == OutputKind.BUFFER_MUTATION:
                value, buffer = self._env[by_name[spec.arg.name]], buffers[spec.target]
                if value is not buffer:
                    self.emit(ir.IdCopyNode, x=self.cast(value, buffer.dtype), out=buffer)

    def _attribute(self, module: GraphModule, node: Node) -> Any:
        value = module
        for part in node.target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            if value.ndim == 0 and not isinstance(value, FakeTensor):
                return self.scalar(value.item(), value.dtype)
            return self.constant(node.target, value)
        return value  # a branch or a body

    # -- what handlers use ----------------------------------------------------

    @property
    def node(self) -> Node:
        """The node being lowered."""
        return self._nodes[-1]

    @property
    def out(self) -> Any:
        """Its fake value: a tensor, a SymInt, or a list of them."""
        return self.node.meta["val"]

    def value(self, node: Node) -> Any:
        """What `node` was lowered to (for patterns)."""
        return self._env[node]

    def value_or_none(self, node: Any) -> Any:
        return self._env.get(node) if isinstance(node, Node) else None

    def is_constant(self, node: Node) -> bool:
        slot = self.value_or_none(node)
        return isinstance(slot, TensorSlot) and slot.space == Space.CONSTANT

    def emit(self, op: type[ir.Op], *, dtype: torch.dtype | None = None, **fields: Any) -> Any:
        """Append an instruction; returns its `out` slot, a fresh one unless given.

        `dtype` is that of the fresh slot; by default that of the first tensor operand. An
        instruction that has been emitted before is not emitted again, nor is one whose result
        an operand is already.
        """
        kinds = {f.name: f.type for f in op.FIELDS}
        unknown = set(fields) - set(kinds)
        if unknown:
            raise TypeError(f"{op.__name__} has no field {', '.join(sorted(unknown))}")
        if op.OP_TYPE >= FIRST_OWN_OP and not self.own_nodes:
            raise Unsupported(
                f"{op.__name__} is a node that ExecuTorch's own MLX delegate lacks; "
                "MLXPartitioner(own_nodes=True) asks for it"
            )
        key = None
        if "out" in kinds and "out" not in fields:
            fields = simplified(self._made, op, fields)
            if isinstance(fields, TensorSlot):
                return fields
            key = _expression(op, fields)
            for known in self._known if key else ():
                if key in known:
                    return known[key]
            if kinds["out"] == "Vid":
                fields["out"] = ValueSlot(int)
            else:
                if dtype is None:
                    dtype = next(v.dtype for v in fields.values() if isinstance(v, TensorSlot))
                fields["out"] = TensorSlot(dtype=dtype)
        self._chain.append(Emitted(op, fields))
        if key is not None:
            self._known[-1][key] = fields["out"]
            self._made[fields["out"]] = self._chain[-1]
        return fields.get("out", fields.get("outs"))

    def constant(
        self, name: str, data: torch.Tensor | Callable[[], torch.Tensor], shape=None, dtype: torch.dtype | None = None
    ) -> TensorSlot:
        """A tensor that travels with the program: `data`, or what it gives, of `shape` and `dtype`, when it
        is called, which is only at serialization."""
        if isinstance(data, torch.Tensor):
            tensor = data
            shape, dtype, data = tensor.shape, tensor.dtype, lambda: tensor
        return TensorSlot(dtype=dtype, shape=tuple(shape), space=Space.CONSTANT, name=name, data=data)

    def scalar(self, value: bool | int | float | ValueSlot, dtype: torch.dtype) -> TensorSlot:
        """A 0-d tensor of a number; a number known only at run time is made there."""
        if isinstance(value, ValueSlot):
            return self.full([], value, dtype)
        key = (repr(value), dtype)
        if key not in self._scalars:
            tensor = torch.tensor(value, dtype=dtype)
            name = f"scalar_{len(self._scalars)}"
            self._scalars[key] = self.constant(name, tensor)
            self._scalars[key].number = tensor.item()
        return self._scalars[key]

    def full(self, shape: list, value: bool | int | float | ValueSlot, dtype: torch.dtype) -> TensorSlot:
        if not shape and not isinstance(value, ValueSlot):
            return self.scalar(value, dtype)
        if isinstance(value, bool):
            value = int(value)
        scalar_type = dtypes.scalar_type(dtype)
        return self.emit(ir.FullNode, shape=shape, v=value, scalar_type=scalar_type, dtype=dtype)

    def fresh(self, val: Any) -> Slot:
        """A new slot for a value like `val`."""
        return slot_for(val)

    def cast(self, x: TensorSlot, dtype: torch.dtype) -> TensorSlot:
        if x.dtype == dtype:
            return x
        if x.number is not None:
            return self.scalar(torch.tensor(x.number, dtype=x.dtype).to(dtype).item(), dtype)
        out = self.emit(ir.AsTypeNode, x=x, scalar_type=dtypes.scalar_type(dtype), dtype=dtype)
        out.shape = x.shape
        return out

    def size(self, x: TensorSlot, dim: int) -> int | ValueSlot:
        """Extent of a dimension: an int where it is static, else a slot filled at run time."""
        static = x.shape[dim]
        if isinstance(static, int):
            return static
        return self.emit(ir.SymSizeNode, a=x, dim=dim % x.ndim)

    def item(self, x: TensorSlot) -> ValueSlot:
        """A one-element tensor as an int on the host: waits for it."""
        return self.emit(ir.ItemIntNode, x=x)

    def in_place(self, x: TensorSlot) -> TensorSlot | None:
        """`x` itself if it is a mutable buffer that nothing reads after this node."""
        if x.space != Space.BUFFER or self._chain is not self.chains[0] or len(self._nodes) > 1:
            return None
        now = self._position[self.node]
        for holder in self._holders[x]:
            for user in holder.users:
                if user is not self.node and self._position[user] > now and not (
                    user.op == "output" and self._only_written_back(holder)
                ):
                    return None
        return x

    def _only_written_back(self, node: Node) -> bool:
        specs = self.program.graph_signature.output_specs
        kinds = [s.kind for s in specs if getattr(s.arg, "name", None) == node.name]
        return all(kind == OutputKind.BUFFER_MUTATION for kind in kinds)

    @contextmanager
    def chain(self) -> Iterator[int]:
        """Emit into a new instruction chain; yields its index."""
        outer, self._chain = self._chain, []
        self.chains.append(self._chain)
        self._known.append({})
        try:
            yield len(self.chains) - 1
        finally:
            self._known.pop()
            self._chain = outer

    def inline(self, module: GraphModule, arguments: Sequence[Any]) -> list[Any]:
        """Lower the graph of `module` here, with `arguments` for its placeholders."""
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        for node, argument in zip(placeholders, arguments, strict=True):
            self._set(node, argument)
        self._run(module)
        outputs = module.graph.output_node().args[0]
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return [self._env[n] if isinstance(n, Node) else n for n in outputs]

    def trace(self, text: Callable, *args: Any, **kwargs: Any) -> list[Any]:
        """Lower a torch function: see `trace.trace`."""
        return self.inline(*trace(self.registry, self._fake_mode, text, args, kwargs))


def _external(val: Any) -> Any:
    """A slot for a value that the delegate will be handed, in a dry run."""
    if isinstance(val, (list, tuple)):
        return [_external(v) for v in val]
    return None if val is None else slot_for(val)


def _expression(op: type[ir.Op], fields: dict[str, Any]) -> tuple | None:
    """What names the value of an instruction, or None if running it twice may differ."""
    if op is ir.RandomBitsNode and fields.get("seed") is None:
        return None
    frozen = []
    for name, value in sorted(fields.items()):
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(v, TensorSlot) and v.space == Space.BUFFER for v in values):
            return None
        # 1, 1.0 and True are one key of a dict.
        frozen.append((name, tuple(v if isinstance(v, Slot) else repr(v) for v in values)))
    return op, tuple(frozen)
