"""Lowers an exported program to instructions.

`ProgramBuilder` walks the graph and calls the handler of each FX node. The partitioner uses this walk as a dry run
(`check`), and the backend uses it to compile (`build`). `assemble` turns the result into an MLX program.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind
from torch.fx import Node

from ..extents import memory_order
from ..serialization import ir
from ..serialization.portability import Problem
from .lowering import Lowering, call_handler, undelegated_slots
from .matcher import Match
from .portable import make_portable
from .registry import REGISTRY, Registry, Unsupported, aten_target, target_name
from .slots import Slot, Space, TensorSlot, slot_for


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


# The interface: slots for the inputs, outputs, constants and buffers of the graph --------------

# The key in the metadata of a placeholder, below "custom", of the name of the `.ptd` file that stores the tensor.
# ExecuTorch's pass `delegate_external_constants_pass_unlifted` sets it.
EXTERNAL_FILE = "delegate_constant_tag"


def bind_inputs(P: Lowering) -> None:
    """Record the value of every placeholder of the graph, and add the slots of inputs and buffers to `P.interface`."""
    signature = P.program.graph_signature
    mutated = {*signature.buffers_to_mutate.values(), *P.buffer_keys}
    placeholders = {n.name: n for n in P.program.graph.nodes if n.op == "placeholder"}
    for spec in signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind == InputKind.USER_INPUT:
            value = _user_input(P, spec, node)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            value = _stored_input(P, spec, node, spec.target in mutated)
        else:
            value = None  # effect tokens and custom objects
        P.set_value(node, value)


def _user_input(P: Lowering, spec: InputSpec, node: Node) -> Any:
    if isinstance(spec.arg, ConstantArgument):
        return spec.arg.value
    slot = slot_for(node.meta["val"])
    if isinstance(slot, TensorSlot):
        slot.space, slot.name, slot.order = Space.INPUT, node.name, memory_order(node.meta["val"])
    P.interface.inputs.append(slot)
    return slot


def _stored_input(P: Lowering, spec: InputSpec, node: Node, is_mutated: bool) -> TensorSlot:
    """Return the slot of a parameter, buffer or constant.

    It is a buffer slot if the program or another method writes the tensor, else the slot of a constant or, for a
    number, of a scalar.
    """
    if not is_mutated and (number := _number_tensor(P.program, spec)) is not None:
        return P.scalar(number.item(), number.dtype)
    slot = slot_for(
        node.meta["val"],
        space=Space.BUFFER if is_mutated else Space.CONSTANT,
        name=spec.target,
        data=lambda: _read(P, node, spec.target),
    )
    if is_mutated:
        P.interface.buffers.append(slot)
    return slot


def _number_tensor(program: ExportedProgram, spec: InputSpec) -> torch.Tensor | None:
    """Return the 0-d tensor of a constant or buffer, or None if the input is no such tensor.

    torch.export stores a Python number of the source as a 0-d tensor.
    """
    if spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
        return None
    stores = (program.state_dict, program.constants)
    value = next((store[spec.target] for store in stores if spec.target in store), None)
    is_number = isinstance(value, torch.Tensor) and value.ndim == 0 and not isinstance(value, FakeTensor)
    return value if is_number else None


def _read(P: Lowering, node: Node, name: str) -> torch.Tensor:
    """Return the tensor `name`, whose placeholder is `node`, and record its external file."""
    P.files_read.add((node.meta.get("custom") or {}).get(EXTERNAL_FILE))
    return stored_tensor(P.program, name)


def stored_tensor(program: ExportedProgram, name: str) -> torch.Tensor:
    """Return the parameter, buffer or constant `name` of `program`. Raises KeyError if there is none."""
    for store in (program.state_dict, program.constants):
        if name in store:
            return store[name]
    raise KeyError(f"{name} is in neither the state dict nor the constants")


def bind_outputs(P: Lowering) -> None:
    """Add the outputs to `P.interface`, and emit a copy of each buffer's new value into the buffer.

    A buffer that was updated in place needs no copy.
    """
    specs = P.program.graph_signature.output_specs
    nodes = {n.name: n for n in P.program.graph.output_node().args[0] if isinstance(n, Node)}
    user_outputs: list[tuple[Slot, Any]] = []
    mutations: list[tuple[str, TensorSlot]] = []
    for spec in specs:
        if spec.kind == OutputKind.USER_OUTPUT:
            node = nodes[spec.arg.name]
            user_outputs.append((P.value(node), node.meta["val"]))
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            mutations.append((spec.target, P.value(nodes[spec.arg.name])))
        else:
            raise Unsupported(f"output of kind {spec.kind.name}")
    # Outputs and new values are copied before the buffers are written, because they may be old values of buffers.
    P.interface.outputs += [_output(P, slot, val) for slot, val in user_outputs]
    buffers = {b.name: b for b in P.interface.buffers}
    writes = [(buffers[name], _new_value(P, buffers[name], value)) for name, value in mutations]
    for buffer, value in writes:
        if value is not buffer:
            P.emit(ir.IdCopyNode, x=value, out=buffer)


def _new_value(P: Lowering, buffer: TensorSlot, value: TensorSlot) -> TensorSlot:
    """Return a slot with the new value of `buffer` that no write of another buffer changes."""
    value = P.cast(value, buffer.dtype)
    if value.space != Space.BUFFER or value is buffer:
        return value
    return P.emit(ir.IdCopyNode, x=value, out=TensorSlot(value.dtype, value.shape))


def _output(P: Lowering, slot: Slot, val: Any) -> Slot:
    """Return the slot of an output whose value is in `slot`. `val` is its fake value.

    A temporary becomes an output slot. A slot that is already an input, constant, buffer or output is copied.
    """
    if isinstance(slot, TensorSlot):
        order = memory_order(val)
        if order is not None:
            slot = _in_order(P, slot, order)
        elif slot.space != Space.TEMP:
            slot = P.emit(ir.IdCopyNode, x=slot, out=TensorSlot(slot.dtype, slot.shape))
        slot.space = Space.OUTPUT  # type: ignore[union-attr]
    return slot


def _in_order(P: Lowering, x: TensorSlot, order: tuple[int, ...]) -> TensorSlot:
    """Return a new slot of the shape of `x` whose elements, in row-major order, are those of `x` in the order `order`.

    ExecuTorch's own MLX delegate copies the result of a program row-major, whatever the order of the output is.
    """
    out = TensorSlot(x.dtype, x.shape, order=order)
    sizes = [P.size(x, axis) for axis in range(x.ndim)]
    return P.emit(ir.ReshapeNode, x=P.emit(ir.TransposeNode, x=x, perm=list(order)), shape=sizes, out=out)
