"""A .pte file under a meaning: its methods, their inputs and outputs, and what outlives a call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from executorch.exir import schema as et
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch_mlx.builder.dtypes import SCALAR_TYPES
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.read import read_payload

from .arrays import MLX_DTYPES, from_bytes, from_torch, to_torch
from .call import MLX_ERRORS, Call
from .meaning import Meaning, Refused

BACKEND = "MLXBackend"
VERSION = 1  # of the IR


class Program:
    """A file. A method is loaded at its first call, and keeps its constants and buffers."""

    def __init__(self, pte: bytes | Path, meaning: Meaning):
        self.meaning = meaning
        self.file = deserialize_pte_binary(pte if isinstance(pte, bytes) else Path(pte).read_bytes())
        self.plans = {plan.name: plan for plan in self.file.program.execution_plan}
        self.buffers: dict[str, mx.array] = {}  # by name, for all methods, if they share buffers
        self._methods: dict[str, Method] = {}

    @property
    def methods(self) -> list[str]:
        return list(self.plans)

    def execute(self, method: str, inputs: Sequence[Any]) -> list[Any]:
        """Run a method, and return its outputs. Raises Refused where the runtime returns an error."""
        if method not in self._methods:
            self._methods[method] = Method(self, self.plans[method])
        return self._methods[method].execute(inputs)

    def graph(self, delegate: et.BackendDelegate) -> ir.MLXGraph:
        if delegate.id != BACKEND:
            raise NotImplementedError(f"the program calls the backend {delegate.id}")
        return read_payload(bytes(self.file.program.backend_delegate_data[delegate.processed.index].data))

    def data(self, name: str) -> bytes | None:
        """Return the named data, or None if the file has none of this name."""
        named = self.file.named_data
        entry = named.pte_data.get(name) if named else None
        return entry and named.buffers[entry.buffer_index]


class Method:
    """A method: it calls delegates, and nothing else."""

    def __init__(self, program: Program, plan: et.ExecutionPlan):
        self.plan, self.meaning = plan, program.meaning
        self.delegates = [Delegate(program, program.graph(d)) for d in plan.delegates]

    def execute(self, inputs: Sequence[Any]) -> list[Any]:
        specs = [value.val for value in self.plan.values]
        values: dict[int, Any] = {}
        if len(inputs) != len(self.plan.inputs):
            raise Refused(f"got {len(inputs)} inputs, expected {len(self.plan.inputs)}")
        for index, value in zip(self.plan.inputs, inputs):
            values[index] = _input(specs[index], value)
            if not self.meaning.empty and isinstance(value, torch.Tensor) and not any(self.plan.non_const_buffer_sizes):
                raise Refused("input: has no memory")
        for chain in self.plan.chains:
            for instruction in chain.instructions:
                self._step(instruction.instr_args, specs, values)
        return [values[i] if i in values else _constant(specs[i]) for i in self.plan.outputs]

    def _step(self, step: et.InstructionArguments, specs: list[Any], values: dict[int, Any]) -> None:
        if isinstance(step, et.FreeCall):
            return
        if not isinstance(step, et.DelegateCall):
            raise NotImplementedError(f"the method makes a {type(step).__name__}")
        delegate = self.delegates[step.delegate_index]
        count = len(delegate.graph.input_map or ())
        operands = [(specs[i], values[i] if i in values else _constant(specs[i])) for i in step.args[:count]]
        results = delegate.execute(operands, [specs[i] for i in step.args[count:]])
        values.update(zip(step.args[count:], results))


def _input(spec: Any, value: Any) -> Any:
    """Check an input of a method, as ExecuTorch does before it calls a delegate."""
    if not isinstance(spec, et.Tensor):
        if isinstance(value, torch.Tensor):
            raise Refused(f"got a tensor, expected {spec}")
        return value
    if not isinstance(value, torch.Tensor) or SCALAR_TYPES.get(value.dtype) != spec.scalar_type:
        raise Refused(f"got {getattr(value, 'dtype', value)}, expected ScalarType {spec.scalar_type}")
    _check_sizes(spec, list(value.shape))
    return value


def _check_sizes(spec: et.Tensor, shape: list[int]) -> None:
    """A static tensor has its sizes, and a dynamic one at most those that the file declares."""
    is_static = spec.shape_dynamism == et.TensorShapeDynamism.STATIC
    fits = shape == spec.sizes if is_static else all(a <= b for a, b in zip(shape, spec.sizes))
    if len(shape) != len(spec.sizes) or not fits:
        raise Refused(f"got shape {shape}, expected {'' if is_static else 'at most '}{spec.sizes}")


def _constant(spec: Any) -> Any:
    if isinstance(spec, et.Int):
        return spec.int_val
    raise NotImplementedError(f"the method uses a constant {type(spec).__name__} of the file")


def strides_for(shape: Sequence[int], dim_order: Sequence[int]) -> list[int]:
    strides, stride = [0] * len(shape), 1
    for axis in reversed(dim_order):
        strides[axis] = stride
        stride *= max(shape[axis], 1)
    return strides


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """As ExecuTorch's runtime defines it: of empty tensors, only those whose first axis is the empty one."""
    return all(strides[i] == (strides[i + 1] * shape[i + 1] if i + 1 < len(shape) else 1) for i in range(len(shape)))


class Delegate:
    """A loaded MLX program, with its constants and buffers."""

    def __init__(self, program: Program, graph: ir.MLXGraph):
        self.graph, self.meaning, self.program = graph, program.meaning, program
        if graph.version and int(graph.version) > VERSION:
            raise Refused(f"version: got {graph.version}, expected at most {VERSION}")
        nodes = [i.op for chain in graph.instruction_chains for i in chain.instructions]
        if unknown := {n.NAME for n in nodes if type(n) not in self.meaning.nodes}:
            raise Refused(f"unknown nodes: {', '.join(sorted(unknown))}")
        slots = [s for s in graph.named_slots or () if s.slot.slot_type == ir.SlotType.TensorSlot]
        self.names = {s.slot.idx: s.name for s in slots}
        self.constants = {i: self._constant(i) for i in range(graph.num_constant_tensors)}
        shared = self.meaning.shared_buffers
        self.buffers = program.buffers if shared else {}
        buffers = [slot.idx for slot in graph.mutable_buffer_map or ()]
        self.buffer_keys = {i: self.names.get(i, (id(self), i)) if shared else i for i in buffers}
        new = {key: slot for slot, key in self.buffer_keys.items() if key not in self.buffers}
        for key, slot in new.items():
            self.buffers[key] = self._initial(slot)
        if graph.init_chain_idx >= 0 and (new or not self.buffer_keys):
            self._call(is_init=True).run(graph.init_chain_idx)

    def _call(self, is_init: bool = False) -> Call:
        return Call(self.graph, self.meaning, self.constants, self.buffers, self.buffer_keys, is_init)

    def _constant(self, slot: int) -> mx.array:
        data = self.program.data(self.names.get(slot))
        if data is None:
            raise Refused(f"constant {slot} has no data")
        shape, scalar_type = self._declared(slot)
        return from_bytes(data, shape, scalar_type)

    def _initial(self, slot: int) -> mx.array:
        """Return the value of a buffer before the first call."""
        shape, scalar_type = self._declared(slot)
        dtype = self.meaning.dtype(scalar_type)
        data = self.program.data(self.names.get(slot)) if self.meaning.shared_buffers else None
        if data is None:
            return mx.zeros(self.meaning.shape(shape, dtype), dtype)
        return from_bytes(data, shape, scalar_type)

    def _declared(self, slot: int) -> tuple[list[int], int]:
        meta = self.graph.tensor_meta[slot]
        shape = [d.value for d in meta.shape]
        self.meaning.dtype(meta.scalar_type)
        if -1 in shape:
            raise Refused(f"tensor slot {slot} has a dynamic shape, expected a static one")
        return shape, meta.scalar_type

    def execute(self, operands: Sequence[tuple[Any, Any]], outputs: Sequence[Any]) -> list[Any]:
        """Run the main chain. An operand is its declaration in the file, and its value. Returns the outputs."""
        call = self._call()
        for slot, (spec, value) in zip(self.graph.input_map or (), operands):
            if slot.slot_type == ir.SlotType.TensorSlot:
                call.tensors[slot.idx] = self._array(slot.idx, spec, value)
            elif slot.slot_type == ir.SlotType.IntValueSlot:
                call.values[slot.idx] = self.meaning.checked(value, "input")
            else:
                raise Refused(f"inputs of type {slot.slot_type.name} are not supported")
        call.run(self.graph.main_chain_idx)
        return [self._output(call, slot, spec) for slot, spec in zip(self.graph.output_map or (), outputs)]

    def _array(self, slot: int, spec: et.Tensor, value: torch.Tensor) -> mx.array:
        dtype = self.meaning.dtype(spec.scalar_type)
        if MLX_DTYPES[self.graph.tensor_meta[slot].scalar_type] != dtype:
            raise Refused(f"input: got {dtype}, and the program declares another dtype")
        if not self.meaning.any_layout and not _is_contiguous(value.shape, strides_for(value.shape, spec.dim_order)):
            raise Refused(f"input: shape {list(value.shape)} in dim order {list(spec.dim_order)} is not contiguous")
        return from_torch(value)

    def _output(self, call: Call, slot: ir.SlotVariant, spec: Any) -> Any:
        if slot.slot_type == ir.SlotType.IntValueSlot:
            return call.value(ir.Vid(slot.idx))
        if slot.slot_type != ir.SlotType.TensorSlot:
            raise Refused(f"outputs of type {slot.slot_type.name} are not supported")
        try:
            result = call.read(ir.Tid(slot.idx)).astype(self.meaning.dtype(spec.scalar_type))
            mx.eval(result)
        except MLX_ERRORS as error:
            raise Refused(f"output: {error}") from error
        _check_sizes(spec, list(result.shape))
        tensor = to_torch(result)
        # A declared order says that the program itself has put the elements in this order.
        is_in_order = self.meaning.any_layout and list(self.graph.tensor_meta[slot.idx].dim_order) != spec.dim_order
        if is_in_order or not tensor.numel():
            return tensor
        return tensor.reshape(-1).as_strided(tensor.shape, strides_for(tensor.shape, spec.dim_order)).contiguous()
