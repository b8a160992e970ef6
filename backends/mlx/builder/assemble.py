"""Emitted instructions → an `ir.MLXGraph` and the constants that go with it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from ..serialization import ir
from . import dtypes
from .liveness import drop_dead, lifetimes, recycle, slots_in
from .program import Emitted, ProgramBuilder
from .slots import Space, TensorSlot, ValueSlot

VERSION = "1"

_SLOT_TYPES = {
    int: ir.SlotType.IntValueSlot,
    float: ir.SlotType.FloatValueSlot,
    bool: ir.SlotType.BoolValueSlot,
}


@dataclass
class Program:
    """`constants` are the named data: by content, so that equal tensors are stored once."""

    graph: ir.MLXGraph
    constants: dict[str, torch.Tensor]


def assemble(builder: ProgramBuilder, *, recycled: bool = True) -> Program:
    """Number the slots of a built program and write it down.

    Temporaries that do not live at the same time share a number, unless `recycled` is False.
    """
    drop_dead(builder)
    return _Assembler(builder, recycled).program


class _Assembler:
    def __init__(self, builder: ProgramBuilder, recycled: bool):
        self.tids: dict[TensorSlot, int] = {}
        self.vids: dict[ValueSlot, int] = {}
        self.constants: dict[str, torch.Tensor] = {}
        interface = builder.interface
        spaces = self._slots_by_space(builder)
        representative = self._store_constants(spaces[Space.CONSTANT])
        spaces[Space.CONSTANT] = list(dict.fromkeys(representative.values()))
        persistent = [slot for space in Space if space != Space.TEMP for slot in spaces[space]]
        self.tids = {slot: i for i, slot in enumerate(persistent)}
        self.tids |= {slot: self.tids[rep] for slot, rep in representative.items()}
        temporaries = {slot: i for i, slot in enumerate(spaces[Space.TEMP])}
        if recycled:
            temporaries = recycle(lifetimes(builder))
        self.tids |= {slot: len(persistent) + i for slot, i in temporaries.items()}

        chains = [
            ir.InstructionChain(
                instructions=[ir.Instruction(op=self._instruction(e)) for e in chain]
            )
            for chain in builder.chains
        ]
        self.program = Program(
            graph=ir.MLXGraph(
                version=VERSION,
                num_constant_tensors=len(spaces[Space.CONSTANT]),
                num_input_tensors=len(spaces[Space.INPUT]),
                num_output_tensors=len(spaces[Space.OUTPUT]),
                num_mutable_buffer_tensors=len(spaces[Space.BUFFER]),
                num_temp_tensors=len(set(temporaries.values())),
                num_values=len(self.vids),
                instruction_chains=chains,
                main_chain_idx=0,
                init_chain_idx=-1,
                input_map=[self._variant(s) for s in interface.inputs],
                output_map=[self._variant(s) for s in interface.outputs],
                mutable_buffer_map=[self._variant(s) for s in interface.buffers],
                named_slots=self._named_slots(persistent),
                tensor_meta=[_tensor_meta(s) for s in persistent],
            ),
            constants=self.constants,
        )

    def _slots_by_space(self, builder: ProgramBuilder) -> dict[Space, list[TensorSlot]]:
        """Every tensor slot once: the interface in its order, the others as first met."""
        interface = builder.interface
        seen: dict[TensorSlot, None] = {}
        for slot in [*interface.inputs, *interface.outputs, *interface.buffers]:
            self._see(slot, seen)
        for chain in builder.chains:
            for emitted in chain:
                for value in emitted.fields.values():
                    for slot in slots_in(value):
                        self._see(slot, seen)
        return {space: [s for s in seen if s.space == space] for space in Space}

    def _see(self, slot: Any, seen: dict[TensorSlot, None]) -> None:
        if isinstance(slot, TensorSlot):
            seen.setdefault(slot)
        elif isinstance(slot, ValueSlot):
            self.vids.setdefault(slot, len(self.vids))

    # -- constants ------------------------------------------------------------

    def _store_constants(self, slots: list[TensorSlot]) -> dict[TensorSlot, TensorSlot]:
        """Fill `constants`; slot → the slot that stands for its content."""
        first: dict[str, TensorSlot] = {}
        representative = {}
        for slot in slots:
            tensor = slot.data().detach().contiguous()
            if tuple(tensor.shape) != tuple(slot.shape) or tensor.dtype != slot.dtype:
                raise ValueError(
                    f"constant {slot.name}: the data is {tensor.dtype} {list(tensor.shape)}, "
                    f"the program expects {slot.dtype} {list(slot.shape)}"
                )
            key = self._key(slot.name, tensor)
            content = key.rsplit(".", 1)[1]
            if content not in first:
                first[content] = slot
                self.constants[key] = tensor
                slot.name = key
            representative[slot] = first[content]
        return representative

    @staticmethod
    def _key(name: str, tensor: torch.Tensor) -> str:
        """Name and digest of content, shape and dtype: equal keys are equal tensors, in every
        method of a .pte."""
        digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(raw_bytes(tensor))
        return f"{name}.{digest.hexdigest()[:16]}"

    def _named_slots(self, persistent: list[TensorSlot]) -> list[ir.NamedSlot]:
        named = []
        for slot in persistent:
            name = slot.name
            if slot.space == Space.BUFFER:
                initial = slot.data().detach().contiguous()
                name = self._key(slot.name, initial)
                if torch.count_nonzero(initial):
                    self.constants[name] = initial
            if name is not None:
                named.append(ir.NamedSlot(name=name, slot=self._variant(slot)))
        return named

    # -- operands -------------------------------------------------------------

    def _variant(self, slot: TensorSlot | ValueSlot) -> ir.SlotVariant:
        if isinstance(slot, TensorSlot):
            return ir.SlotVariant(idx=self.tids[slot], slot_type=ir.SlotType.TensorSlot)
        return ir.SlotVariant(idx=self.vids[slot], slot_type=_SLOT_TYPES[slot.kind])

    def _instruction(self, emitted: Emitted) -> ir.Op:
        kinds = {f.name: f.type for f in emitted.op.FIELDS}
        operands = {
            name: self._operand(kinds[name], value)
            for name, value in emitted.fields.items()
            if value is not None
        }
        return emitted.op(**operands)

    def _operand(self, kind: str, value: Any) -> Any:
        if kind.startswith("["):
            return [self._operand(kind[1:-1], v) for v in value]
        if kind == "Tid":
            return self._tid(value)
        if kind == "Vid":
            return self._vid(value)
        if kind in ("IntOrVid", "FloatOrVid"):
            cls = getattr(ir, kind)
            if isinstance(value, ValueSlot):
                return cls(vid=self._vid(value), is_vid=True)
            return cls(literal=float(value) if kind == "FloatOrVid" else int(value))
        if kind == "VidOrTid":
            if isinstance(value, ValueSlot):
                return ir.VidOrTid(vid=self._vid(value), is_vid=True)
            return ir.VidOrTid(tid=self._tid(value))
        if kind == "IntOrVidOrTid":
            if isinstance(value, ValueSlot):
                return ir.IntOrVidOrTid(vid=self._vid(value), kind=1)
            if isinstance(value, TensorSlot):
                return ir.IntOrVidOrTid(tid=self._tid(value), kind=2)
            return ir.IntOrVidOrTid(literal=int(value))
        return value

    def _tid(self, slot: TensorSlot) -> ir.Tid:
        return ir.Tid(idx=self.tids[slot])

    def _vid(self, slot: ValueSlot) -> ir.Vid:
        return ir.Vid(idx=self.vids[slot])


def raw_bytes(tensor: torch.Tensor) -> memoryview | bytes:
    """The bytes of a contiguous tensor, without a copy."""
    if tensor.numel() == 0:
        return b""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _tensor_meta(slot: TensorSlot) -> ir.TensorMeta:
    return ir.TensorMeta(
        shape=[_shape_dim(d) for d in slot.shape],
        scalar_type=dtypes.scalar_type(slot.dtype),
        dim_order=list(range(len(slot.shape))),
    )


def _shape_dim(dim: int | torch.SymInt) -> ir.ShapeDim:
    if isinstance(dim, int):
        return ir.ShapeDim(value=dim)
    bounds = dim.node.shape_env.bound_sympy(dim.node.expr)
    upper = int(bounds.upper) if bounds.upper.is_finite and bounds.upper < 2**31 - 1 else -1
    # torch reasons about dynamic extents of 2 and more whatever lower bound it was given below
    # that; the bound itself does not reach us.
    lower = int(bounds.lower) if bounds.lower > 2 else 0
    return ir.ShapeDim(value=-1, min_value=lower, max_value=upper)
