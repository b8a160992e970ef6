"""Turns the instructions of a `ProgramBuilder` into an `ir.MLXGraph` and the constants of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..extents import bounds
from ..serialization import ir
from ..serialization.listing import without_digest
from . import dtypes
from .digests import Digests
from .emitter import Emitted
from .liveness import arrange, lifetimes, recycle, slots_in
from .portable import has_extensions
from .program import ProgramBuilder
from .slots import Space, TensorSlot, ValueSlot

IR_VERSION = "1"
_LARGE = 4 << 10  # bytes

_SLOT_TYPES = {int: ir.SlotType.IntValueSlot, float: ir.SlotType.FloatValueSlot, bool: ir.SlotType.BoolValueSlot}


@dataclass
class MLXProgram:
    """An MLX program. `constants` maps keys to the tensors of the program's named data.

    `files` maps the key of each tensor that is stored outside of the `.pte` to the name of its file.
    """

    graph: ir.MLXGraph
    constants: dict[str, torch.Tensor]
    files: dict[str, str]


def assemble(
    builder: ProgramBuilder,
    *,
    reuse_slots: bool = True,
    digests: Digests | None = None,
    weights_file: str | None = None,
) -> MLXProgram:
    """Convert the program of `builder`, whose `build` has run, to the IR.

    Removes dead instructions from `builder` and orders the others, then numbers the slots. With `reuse_slots`,
    temporaries with disjoint lifetimes share a slot. `digests` remembers the digests of constants for the programs of
    other methods. `weights_file` is the external file of large constants, without its suffix.
    """
    arrange(builder)
    return _Assembler(builder, reuse_slots, digests or Digests(), weights_file).assemble()


class _Assembler:
    def __init__(self, builder: ProgramBuilder, reuse_slots: bool, digests: Digests, weights_file: str | None):
        self.builder, self.digests, self.weights_file = builder, digests, weights_file
        self.constants: dict[str, torch.Tensor] = {}
        self.files: dict[str, str] = {}
        self.vids: dict[ValueSlot, int] = {}
        self.slots_by_space = self._collect_slots()
        self.initial = self._initial_values(self.slots_by_space[Space.BUFFER])
        if not has_extensions(builder.chains):
            self.slots_by_space[Space.CONSTANT] += self.initial.values()
        originals = self._store_constants(self.slots_by_space[Space.CONSTANT])
        self.slots_by_space[Space.CONSTANT] = list(dict.fromkeys(originals.values()))
        self.non_temporaries = [slot for space in Space if space != Space.TEMP for slot in self.slots_by_space[space]]
        temporaries = {slot: i for i, slot in enumerate(self.slots_by_space[Space.TEMP])}
        if reuse_slots:
            temporaries = recycle(lifetimes(builder))
        self.num_temporaries = len(set(temporaries.values()))
        self.tids = {slot: i for i, slot in enumerate(self.non_temporaries)}
        self.tids |= {slot: self.tids[original] for slot, original in originals.items()}
        self.tids |= {slot: len(self.non_temporaries) + i for slot, i in temporaries.items()}

    def assemble(self) -> MLXProgram:
        interface, slots, init = self.builder.interface, self.slots_by_space, self._init_chain()
        chains = [*self.builder.chains, init] if init else self.builder.chains
        graph = ir.MLXGraph(
            version=IR_VERSION,
            num_constant_tensors=len(slots[Space.CONSTANT]),
            num_input_tensors=len(slots[Space.INPUT]),
            num_output_tensors=len(slots[Space.OUTPUT]),
            num_mutable_buffer_tensors=len(slots[Space.BUFFER]),
            num_temp_tensors=self.num_temporaries,
            num_values=len(self.vids),
            instruction_chains=[self._chain(chain) for chain in chains],
            main_chain_idx=0,
            init_chain_idx=len(chains) - 1 if init else -1,
            input_map=[self._variant(s) for s in interface.inputs],
            output_map=[self._variant(s) for s in interface.outputs],
            mutable_buffer_map=[self._variant(s) for s in interface.buffers],
            named_slots=self._named_slots(),
            tensor_meta=[_tensor_meta(s) for s in self.non_temporaries],
            replacements=self._replacements(init),
        )
        return MLXProgram(graph, self.constants, self.files)

    # Slots -----------------------------------------------------------------------------------

    def _collect_slots(self) -> dict[Space, list[TensorSlot]]:
        """Return the tensor slots of each space: first those of the interface, then all others in order of use.

        Also numbers the value slots, in `self.vids`.
        """
        interface = self.builder.interface
        seen: dict[TensorSlot, None] = {}
        for slot in [*interface.inputs, *interface.outputs, *interface.buffers]:
            self._collect(slot, seen)
        for chain in [*self.builder.chains, [r.extension for r in self.builder.replacements]]:
            for emitted in chain:
                for value in emitted.fields.values():
                    for slot in slots_in(value):
                        self._collect(slot, seen)
        return {space: [s for s in seen if s.space == space] for space in Space}

    def _collect(self, slot: Any, seen: dict[TensorSlot, None]) -> None:
        """Add a tensor slot to `seen`, or number a value slot."""
        if isinstance(slot, TensorSlot):
            seen.setdefault(slot)
        elif isinstance(slot, ValueSlot):
            self.vids.setdefault(slot, len(self.vids))

    def _named_slots(self) -> list[ir.NamedSlot]:
        """Return the slots with a name: constants, inputs and buffers."""
        names = ((slot, self.buffer_names.get(slot, slot.name)) for slot in self.non_temporaries)
        return [ir.NamedSlot(name=name, slot=self._variant(slot)) for slot, name in names if name is not None]

    def _initial_values(self, buffers: list[TensorSlot]) -> dict[TensorSlot, TensorSlot]:
        """Return a constant for each buffer that does not start from zero. Adds the constants to `self.constants`.

        Also sets `self.buffer_names`: the key of a buffer's initial value, which is its name in the program. If the
        value is in an external file, the name begins with that of the file. Without a file, the runtime takes a buffer
        whose value is nowhere for one that starts from zero.
        """
        self.buffer_names, initial = {}, {}
        for slot in buffers:
            data = slot.data().detach().contiguous()
            digest = self.digests.of(data)
            name = self.builder.buffer_keys.get(slot.name) or _key(slot.name, digest.text)
            is_stored = not digest.is_zero and torch.count_nonzero(data) > 0  # -0.0 is a zero, too
            if is_stored and self._is_large(data):
                name = f"{self.weights_file}:{name}"
                self.files[name] = self.weights_file
            self.buffer_names[slot] = name
            if is_stored:
                self.constants[name] = data
                initial[slot] = TensorSlot(
                    slot.dtype,
                    slot.shape,
                    Space.CONSTANT,
                    without_digest(name),
                    lambda data=data: data,  # type: ignore[misc]
                )
        return initial

    def _init_chain(self) -> list[Emitted]:
        """Return the instructions that give buffers their initial values at load, for ExecuTorch's own MLX delegate.

        This runtime reads the values from the named data, and skips the chain.
        """
        if has_extensions(self.builder.chains):
            return []
        return [Emitted(ir.IdCopyNode, {"x": value, "out": buffer}) for buffer, value in self.initial.items()]

    def _variant(self, slot: TensorSlot | ValueSlot) -> ir.SlotVariant:
        if isinstance(slot, TensorSlot):
            return ir.SlotVariant(idx=self.tids[slot], slot_type=ir.SlotType.TensorSlot)
        return ir.SlotVariant(idx=self.vids[slot], slot_type=_SLOT_TYPES[slot.kind])

    # Constants -------------------------------------------------------------------------------

    def _store_constants(self, slots: list[TensorSlot]) -> dict[TensorSlot, TensorSlot]:
        """Add the tensors of `slots` to `self.constants`. Returns a map from each slot to the slot that stands for it.

        Of slots with equal tensors in the same file, the first one stands for all, and only its tensor is stored. This
        slot is renamed to the key of the tensor.
        """
        first: dict[tuple[str, str | None], TensorSlot] = {}
        originals = {}
        for slot in slots:
            tensor, file = self._read(slot)
            if tuple(tensor.shape) != tuple(slot.shape) or tensor.dtype != slot.dtype:
                raise ValueError(
                    f"constant {slot.name}: got {tensor.dtype} {list(tensor.shape)}, "
                    f"expected {slot.dtype} {list(slot.shape)}"
                )
            digest = self.digests.of(tensor).text
            if (digest, file) not in first:
                first[digest, file] = slot
                slot.name = _key(slot.name, digest) if file is None else _external_key(file, digest)
                self.constants[slot.name] = tensor
                if file is not None:
                    self.files[slot.name] = file
            originals[slot] = first[digest, file]
        return originals

    def _read(self, slot: TensorSlot) -> tuple[torch.Tensor, str | None]:
        """Return the tensor of a constant, and the name of the external file that stores it, or None for the `.pte`.

        A constant that is computed from several tensors is external if all of them belong to the same file.
        """
        files = self.builder.files_read
        files.clear()
        tensor = slot.data().detach().contiguous()
        file = files.pop() if len(files) == 1 else None
        return tensor, self.weights_file if file is None and self._is_large(tensor) else file

    def _is_large(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor without a file of its own belongs to the weights file."""
        return self.weights_file is not None and tensor.nbytes >= _LARGE

    # Instructions ----------------------------------------------------------------------------

    def _chain(self, chain: list[Emitted]) -> ir.InstructionChain:
        return ir.InstructionChain(instructions=[ir.Instruction(op=self._instruction(e)) for e in chain])

    def _replacements(self, init: list[Emitted]) -> list[ir.Replacement] | None:
        """Return the replacements, or None if there are none. `init` is the init chain, the last one."""
        replacements = []
        if init:
            noop = ir.Instruction(op=ir.NoopNode())
            replacements.append(
                ir.Replacement(chain=len(self.builder.chains), first=0, count=len(init), instruction=noop)
            )
        for r in self.builder.replacements:
            (chain,) = (i for i, chain in enumerate(self.builder.chains) if chain is r.chain)
            replaced = {id(e) for e in r.emitted}
            indices = [i for i, e in enumerate(r.chain) if id(e) in replaced]
            instruction = ir.Instruction(op=self._instruction(r.extension))
            replacements.append(
                ir.Replacement(chain=chain, first=indices[0], count=len(indices), instruction=instruction)
            )
        return replacements or None

    def _instruction(self, emitted: Emitted) -> ir.Op:
        types = {f.name: f.type for f in emitted.op.FIELDS}
        fields = {
            name: self._field_value(types[name], value) for name, value in emitted.fields.items() if value is not None
        }
        return emitted.op(**fields)

    def _field_value(self, type_: str, value: Any) -> Any:
        """Return `value`, the value of a field, as the type `type_` of the schema."""
        if type_.startswith("["):
            return [self._field_value(type_[1:-1], v) for v in value]
        if type_ == "Tid":
            return self._tid(value)
        if type_ == "Vid":
            return self._vid(value)
        if type_ in ("IntOrVid", "FloatOrVid"):
            cls = getattr(ir, type_)
            if isinstance(value, ValueSlot):
                return cls(vid=self._vid(value), is_vid=True)
            return cls(literal=float(value) if type_ == "FloatOrVid" else int(value))
        if type_ == "VidOrTid":
            if isinstance(value, ValueSlot):
                return ir.VidOrTid(vid=self._vid(value), is_vid=True)
            return ir.VidOrTid(tid=self._tid(value))
        if type_ == "IntOrVidOrTid":
            # `kind` is 0 for a literal, 1 for a value slot and 2 for a tensor slot.
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


def _key(name: str, digest: str) -> str:
    """Return the key of a tensor in the named data, from its name and its digest.

    Tensors with equal keys are equal, also across the methods of a `.pte`.
    """
    return f"{name}.{digest}"


def _external_key(file: str, digest: str) -> str:
    """Return the key of a tensor in an external file. Other programs that share the file may use other names for it."""
    return f"{file}:{digest}"


def _tensor_meta(slot: TensorSlot) -> ir.TensorMeta:
    return ir.TensorMeta(
        shape=[_shape_dim(d) for d in slot.shape],
        scalar_type=dtypes.scalar_type(slot.dtype),
        dim_order=list(slot.order if slot.space == Space.OUTPUT and slot.order else range(len(slot.shape))),
    )


def _shape_dim(dim: int | torch.SymInt) -> ir.ShapeDim:
    if isinstance(dim, int):
        return ir.ShapeDim(value=dim)
    lower, upper = bounds(dim)
    return ir.ShapeDim(value=-1, min_value=lower, max_value=-1 if upper is None else upper)
