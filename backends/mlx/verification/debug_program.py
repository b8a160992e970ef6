"""Builds a copy of an MLX program that also returns intermediate values.

After the instruction that computes such a value, an additional instruction copies the value to an additional output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir import schema as et
from executorch.exir._serialize._cord import Cord, CordBuffer
from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
from executorch.exir._serialize._program import PTEFile, serialize_pte_binary
from executorch.exir._serialize.data_serializer import DataEntry
from executorch.exir.scalar_type import ScalarType

from ..builder.dtypes import SCALAR_TYPES
from ..inspect.pte import BACKEND
from ..serialization import ir
from ..serialization.pack import pack_payload

_DTYPES = {number: dtype for dtype, number in SCALAR_TYPES.items()}
# The EValue of an input or output that is a number. A call passes its own value instead of this one.
_NUMBER_PLACEHOLDERS = {
    ir.SlotType.IntValueSlot: et.Int(0),
    ir.SlotType.BoolValueSlot: et.Bool(False),
    ir.SlotType.FloatValueSlot: et.Double(0.0),
}
_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Exposed:
    """A value to return: the contents of tensor slot `tid` after instruction `index` of the main chain.

    `shape` has the largest size of each dimension in a call. `is_dynamic`: the calls differ in shape.
    """

    index: int
    tid: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_dynamic: bool


def expose(graph: ir.MLXGraph, values: Sequence[Exposed]) -> ir.MLXGraph:
    """Return a copy of `graph` that returns `values` after its own outputs."""
    # The slots of the additional outputs begin at `first`. The slots of `graph` from `first` on move up.
    first = graph.num_constant_tensors + graph.num_input_tensors + graph.num_output_tensors
    copies: dict[int, list[ir.Instruction]] = {}
    for i, value in enumerate(values):
        copy = ir.IdCopyNode(x=ir.Tid(idx=_shifted(value.tid, first, len(values))), out=ir.Tid(idx=first + i))
        copies.setdefault(value.index, []).append(ir.Instruction(op=copy))
    renumbered = _renumber(graph, first, len(values))
    instructions = []
    for index, instruction in enumerate(renumbered.instruction_chains[graph.main_chain_idx].instructions):
        instructions += [instruction, *copies.get(index, ())]
    renumbered.instruction_chains[graph.main_chain_idx] = ir.InstructionChain(instructions=instructions)
    metas = list(renumbered.tensor_meta)
    return dataclasses.replace(
        renumbered,
        num_output_tensors=graph.num_output_tensors + len(values),
        output_map=[*renumbered.output_map, *(_tensor_slot(first + i) for i in range(len(values)))],
        tensor_meta=[*metas[:first], *map(_meta, values), *metas[first:]],
        replacements=None,  # instructions that are replaced leave no intermediate values
    )


def _shifted(tid: int, first: int, by: int) -> int:
    """Return the new number of a tensor slot: larger by `by` from `first` on."""
    return tid if tid < first else tid + by


def _renumber(x: Any, first: int, by: int) -> Any:
    """Return a copy of `x` in which the numbers of the tensor slots from `first` on are larger by `by`."""
    if isinstance(x, list):
        return [_renumber(item, first, by) for item in x]
    if isinstance(x, ir.Tid):
        return ir.Tid(idx=_shifted(x.idx, first, by))
    if isinstance(x, ir.SlotVariant):
        is_tensor = x.slot_type == ir.SlotType.TensorSlot
        return dataclasses.replace(x, idx=_shifted(x.idx, first, by)) if is_tensor else x
    if dataclasses.is_dataclass(x) and not isinstance(x, (ir.Vid, ir.TensorMeta)):
        fields = {f.name: _renumber(getattr(x, f.name), first, by) for f in dataclasses.fields(x)}
        return dataclasses.replace(x, **fields)
    return x


def _tensor_slot(tid: int) -> ir.SlotVariant:
    return ir.SlotVariant(idx=tid, slot_type=ir.SlotType.TensorSlot)


def _meta(value: Exposed) -> ir.TensorMeta:
    if value.is_dynamic:
        dims = [ir.ShapeDim(value=-1, min_value=0, max_value=size) for size in value.shape]
    else:
        dims = [ir.ShapeDim(value=size) for size in value.shape]
    return ir.TensorMeta(shape=dims, scalar_type=SCALAR_TYPES[value.dtype], dim_order=list(range(len(dims))))


def serialize_program(graph: ir.MLXGraph, constants: Mapping[str, CordBuffer]) -> Cord:
    """Return the contents of a `.pte` file whose only method, `forward`, runs the MLX program `graph`.

    The method takes all inputs and returns all outputs of `graph`, in their order. `constants` maps the key of a
    constant to its data.
    """
    slots = [*(graph.input_map or ()), *(graph.output_map or ())]
    values, memory = [], 0
    for slot in slots:
        value, size = _evalue(slot, graph.tensor_meta, memory)
        values.append(value)
        memory += -(-size // _ALIGNMENT) * _ALIGNMENT
    indices = list(range(len(values)))
    num_inputs = len(graph.input_map or ())
    location = et.BackendDelegateDataReference(et.DataLocation.INLINE, 0)
    plan = et.ExecutionPlan(
        name="forward",
        container_meta_type=et.ContainerMetadata("", ""),
        values=values,
        inputs=indices[:num_inputs],
        outputs=indices[num_inputs:],
        chains=[et.Chain([], [], [et.Instruction(et.DelegateCall(0, indices))], stacktrace=None)],
        operators=[],
        delegates=[et.BackendDelegate(BACKEND, location, [])],
        non_const_buffer_sizes=[0, memory],
    )
    program = et.Program(
        version=0,
        execution_plan=[plan],
        constant_buffer=[et.Buffer(b"")],
        backend_delegate_data=[et.BackendDelegateInlineData(pack_payload(graph))],
        segments=[],
        constant_segment=et.SubsegmentOffsets(0, []),
    )
    keys = [key for key in dict.fromkeys(n.name for n in graph.named_slots or ()) if key in constants]
    entries = {key: DataEntry(index, _ALIGNMENT, None) for index, key in enumerate(keys)}
    data = NamedDataStoreOutput([constants[key] for key in keys], entries, {})
    return serialize_pte_binary(PTEFile(program, named_data=data), extract_delegate_segments=True)


def _evalue(slot: ir.SlotVariant, metas: Sequence[ir.TensorMeta], offset: int) -> tuple[et.EValue, int]:
    """Return an argument of the delegate call, and its size in bytes. A tensor lies at `offset` in planned memory."""
    if slot.slot_type != ir.SlotType.TensorSlot:
        return et.EValue(_NUMBER_PLACEHOLDERS[slot.slot_type]), 0
    meta = metas[slot.idx]
    sizes = [d.value if d.value >= 0 else d.max_value for d in meta.shape]
    size = _DTYPES[meta.scalar_type].itemsize
    for d in sizes:
        size *= d
    is_dynamic = any(d.value < 0 for d in meta.shape)
    tensor = et.Tensor(
        scalar_type=ScalarType(meta.scalar_type),
        storage_offset=0,
        sizes=sizes,
        dim_order=list(meta.dim_order),
        requires_grad=False,
        layout=0,
        data_buffer_idx=0,
        allocation_info=et.AllocationDetails(1, offset & 0xFFFFFFFF, offset >> 32),
        shape_dynamism=et.TensorShapeDynamism.DYNAMIC_BOUND if is_dynamic else et.TensorShapeDynamism.STATIC,
    )
    return et.EValue(tensor), max(size, 1)


def bound_extents(graph: ir.MLXGraph, calls: Sequence[Sequence[Any]]) -> ir.MLXGraph:
    """Return a copy of `graph` with an upper bound for each dynamic extent of its inputs and outputs.

    The bound is the largest size in `calls`, which has the inputs and then the outputs of each call. ExecuTorch
    allocates memory for tensors of these sizes.
    """
    metas = list(graph.tensor_meta)
    for slot, *values in zip([*(graph.input_map or ()), *(graph.output_map or ())], *calls, strict=True):
        if slot.slot_type == ir.SlotType.TensorSlot:
            shape = [
                dim if dim.value >= 0 else dataclasses.replace(dim, max_value=max(sizes))
                for dim, *sizes in zip(metas[slot.idx].shape, *(v.shape for v in values), strict=True)
            ]
            metas[slot.idx] = dataclasses.replace(metas[slot.idx], shape=shape)
    return dataclasses.replace(graph, tensor_meta=metas)


def contiguous(values: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call with every tensor made contiguous."""
    return [v.detach().contiguous() if isinstance(v, torch.Tensor) else v for v in values]
