"""Builds an MLX program and a .pte that contains it, and loads and runs its methods."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from executorch.exir import schema as et
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir._serialize._program import PTEFile, serialize_pte_binary
from executorch.exir.scalar_type import ScalarType
from executorch_mlx import Runtime
from executorch_mlx.builder.digests import raw_bytes
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.pack import pack_payload
from loaded_method import LoadedMethod

SCALAR_TYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
}
FLOAT32, INT32, BOOL = (SCALAR_TYPES[dtype] for dtype in (torch.float32, torch.int32, torch.bool))

# The final number of a slot is known only when the program is complete. Until then, a slot has the provisional number
# KIND_STRIDE * kind + index, where `index` counts the slots of that kind.
KIND_STRIDE = 1 << 16
CONSTANT, INPUT, OUTPUT, BUFFER, TEMP = range(5)

Dim = int | tuple[int, int]


def lit(x: int) -> ir.IntOrVid:
    """An integer literal."""
    return ir.IntOrVid(literal=x)


def lits(*xs: int) -> list[ir.IntOrVid]:
    return [lit(x) for x in xs]


def value_of(vid: ir.Vid) -> ir.IntOrVid:
    """An operand that reads an integer from the value slot `vid`."""
    return ir.IntOrVid(vid=vid, is_vid=True)


def number(x: float) -> ir.FloatOrVid:
    """A float literal."""
    return ir.FloatOrVid(literal=x)


class Graph:
    """Builds one MLX program. In a shape, a pair `(low, high)` is a dynamic dimension with these bounds."""

    def __init__(self):
        self.counts = [0] * 5  # by kind of slot
        self.meta: dict[int, ir.TensorMeta] = {}
        self.names: dict[int, str] = {}
        self.data: dict[str, torch.Tensor] = {}
        # Of a tensor: (slot, shape, dtype, dim order). Of a value: (slot, type of the slot).
        self.inputs: list[tuple[Any, ...]] = []
        self.outputs: list[tuple[Any, ...]] = []
        self.chains: list[list[ir.Op]] = [[]]
        self.num_values = 0
        self.init_chain = -1
        self.replacements: list[tuple[int, int, int, ir.Op]] = []  # chain, first, count, instruction

    def _slot(self, kind: int, shape: Sequence[Dim] = (), dtype=torch.float32) -> ir.Tid:
        tid = ir.Tid(kind * KIND_STRIDE + self.counts[kind])
        self.counts[kind] += 1
        if kind != TEMP:
            self.meta[tid.idx] = ir.TensorMeta(
                shape=[
                    ir.ShapeDim(value=-1, min_value=d[0], max_value=d[1])
                    if isinstance(d, tuple)
                    else ir.ShapeDim(value=d)
                    for d in shape
                ],
                scalar_type=SCALAR_TYPES[dtype],
                dim_order=list(range(len(shape))),
            )
        return tid

    def constant(self, tensor: torch.Tensor) -> ir.Tid:
        """Add a constant and return its slot. The names are c1, c2, …"""
        tid = self._slot(CONSTANT, tensor.shape, tensor.dtype)
        self.names[tid.idx] = f"c{self.counts[CONSTANT]}"
        self.data[self.names[tid.idx]] = tensor
        return tid

    def input(self, shape: Sequence[Dim], dtype=torch.float32, dim_order: Sequence[int] | None = None) -> ir.Tid:
        """Add an input, row-major by default, and return its slot. The names are x1, x2, …"""
        tid = self._slot(INPUT, shape, dtype)
        self.names[tid.idx] = f"x{self.counts[INPUT]}"
        dim_order = self.meta[tid.idx].dim_order = list(dim_order or range(len(shape)))
        self.inputs.append((tid, tuple(shape), dtype, dim_order))
        return tid

    def output(self, shape: Sequence[Dim], dtype=torch.float32) -> ir.Tid:
        tid = self._slot(OUTPUT, shape, dtype)
        self.outputs.append((tid, tuple(shape), dtype, list(range(len(shape)))))
        return tid

    def output_value(self, vid: ir.Vid, kind: ir.SlotType = ir.SlotType.IntValueSlot) -> None:
        self.outputs.append((vid, kind))

    def buffer(self, shape: Sequence[int], dtype=torch.float32, initial=None) -> ir.Tid:
        """Add a mutable buffer that starts with `initial` or zeros, and return its slot. The names are b1, b2, …"""
        tid = self._slot(BUFFER, shape, dtype)
        self.names[tid.idx] = f"b{self.counts[BUFFER]}"
        if initial is not None:
            self.data[self.names[tid.idx]] = initial
        return tid

    def new_temp(self) -> ir.Tid:
        return self._slot(TEMP)

    def new_value(self) -> ir.Vid:
        self.num_values += 1
        return ir.Vid(self.num_values - 1)

    def item(self, tid: ir.Tid) -> ir.Vid:
        """Emit an instruction that reads a tensor of one element into a value slot. Returns the value slot."""
        vid = self.new_value()
        self.emit(ir.ItemIntNode(x=tid, out=vid))
        return vid

    def chain(self, *ops: ir.Op) -> int:
        """Add a chain with the given instructions, and return the index of the chain."""
        self.chains.append(list(ops))
        return len(self.chains) - 1

    def emit(self, *ops: ir.Op) -> None:
        """Append instructions to the main chain."""
        self.chains[0].extend(ops)

    # -- serialization ---------------------------------------------------------

    def _final(self, provisional: int) -> int:
        kind, index = divmod(provisional, KIND_STRIDE)
        return sum(self.counts[:kind]) + index

    def _renumbered(self, x: Any) -> Any:
        if isinstance(x, ir.Tid):
            return ir.Tid(self._final(x.idx))
        if isinstance(x, list):
            return [self._renumbered(item) for item in x]
        if dataclasses.is_dataclass(x) and not isinstance(x, ir.Vid):
            fields = {f.name: self._renumbered(getattr(x, f.name)) for f in dataclasses.fields(x)}
            return dataclasses.replace(x, **fields)
        return x

    def _variant(self, slot) -> ir.SlotVariant:
        if isinstance(slot[0], ir.Tid):
            return ir.SlotVariant(idx=self._final(slot[0].idx))
        return ir.SlotVariant(idx=slot[0].idx, slot_type=slot[1])

    def graph(self) -> ir.MLXGraph:
        meta = {self._final(i): m for i, m in self.meta.items()}
        return ir.MLXGraph(
            version="1",
            num_constant_tensors=self.counts[CONSTANT],
            num_input_tensors=self.counts[INPUT],
            num_output_tensors=self.counts[OUTPUT],
            num_mutable_buffer_tensors=self.counts[BUFFER],
            num_temp_tensors=self.counts[TEMP],
            num_values=self.num_values,
            instruction_chains=[
                ir.InstructionChain(instructions=[ir.Instruction(op=self._renumbered(op)) for op in chain])
                for chain in self.chains
            ],
            init_chain_idx=self.init_chain,
            input_map=[self._variant(slot) for slot in self.inputs],
            output_map=[self._variant(slot) for slot in self.outputs],
            mutable_buffer_map=[
                ir.SlotVariant(idx=self._final(BUFFER * KIND_STRIDE + i)) for i in range(self.counts[BUFFER])
            ],
            named_slots=[
                ir.NamedSlot(name=name, slot=ir.SlotVariant(idx=self._final(i))) for i, name in self.names.items()
            ],
            tensor_meta=[meta[i] for i in sorted(meta)],
            replacements=[
                ir.Replacement(
                    chain=chain, first=first, count=count, instruction=ir.Instruction(op=self._renumbered(op))
                )
                for chain, first, count, op in self.replacements
            ]
            or None,
        )

    def payload(self) -> bytes:
        return pack_payload(self.graph())

    def pte(self, payload: bytes | None = None) -> bytes:
        """Return a .pte with the given payload; by default with the payload of this program."""
        return pte({"forward": self}, payload)

    def load(self, payload: bytes | None = None) -> "Model":
        return Model(self.pte(payload))

    def run(self, *args):
        return self.load()(*args)


def pte(methods: dict[str, Graph], payload: bytes | None = None) -> bytes:
    """Return a .pte with one delegated graph for each method. `payload` replaces the payload of every graph."""
    store, plans, payloads = NamedDataStore(), [], []
    for name, graph in methods.items():
        for key, tensor in graph.data.items():
            raw = bytes(raw_bytes(tensor.contiguous()))
            store.add_named_data(key, raw, alignment=16)
        plans.append(_plan(name, graph, len(payloads)))
        payloads.append(graph.payload() if payload is None else payload)
    program = et.Program(
        version=0,
        execution_plan=plans,
        constant_buffer=[et.Buffer(b"")],
        backend_delegate_data=[et.BackendDelegateInlineData(p) for p in payloads],
        segments=[],
        constant_segment=et.SubsegmentOffsets(0, []),
    )
    named = store.get_named_data_store_output()
    cord = serialize_pte_binary(PTEFile(program, named_data=named), extract_delegate_segments=True)
    return bytes(cord)


def _plan(name: str, graph: Graph, payload_index: int) -> et.ExecutionPlan:
    values, memory = [], 0
    for slot in graph.inputs + graph.outputs:
        value, memory = _evalue(slot, memory)
        values.append(value)
    indices = list(range(len(values)))
    location = et.BackendDelegateDataReference(et.DataLocation.INLINE, payload_index)
    return et.ExecutionPlan(
        name=name,
        container_meta_type=et.ContainerMetadata("", ""),
        values=values,
        inputs=indices[: len(graph.inputs)],
        outputs=indices[len(graph.inputs) :],
        chains=[et.Chain([], [], [et.Instruction(et.DelegateCall(0, indices))], stacktrace=None)],
        operators=[],
        delegates=[et.BackendDelegate("MLXBackend", location, [])],
        non_const_buffer_sizes=[0, memory],
    )


def _evalue(slot, memory: int) -> tuple[et.EValue, int]:
    """Return ExecuTorch's description of an input or output, and the end of its memory.

    `slot` is an element of `Graph.inputs` or `Graph.outputs`. `memory` is the offset at which a tensor gets its memory.
    """
    if isinstance(slot[0], ir.Vid):
        kind = slot[1]
        if kind == ir.SlotType.IntValueSlot:
            return et.EValue(et.Int(0)), memory
        if kind == ir.SlotType.BoolValueSlot:
            return et.EValue(et.Bool(False)), memory
        return et.EValue(et.Double(0.0)), memory
    _, shape, dtype, dim_order = slot
    sizes = [d[1] if isinstance(d, tuple) else d for d in shape]
    size = dtype.itemsize
    for d in sizes:
        size *= d
    dynamic = any(isinstance(d, tuple) for d in shape)
    tensor = et.Tensor(
        scalar_type=ScalarType(SCALAR_TYPES[dtype]),
        storage_offset=0,
        sizes=sizes,
        dim_order=dim_order,
        requires_grad=False,
        layout=0,
        data_buffer_idx=0,
        allocation_info=et.AllocationDetails(1, memory, 0),
        shape_dynamism=(et.TensorShapeDynamism.DYNAMIC_BOUND if dynamic else et.TensorShapeDynamism.STATIC),
    )
    return et.EValue(tensor), memory + -(-max(size, 1) // 16) * 16


def load(pte: bytes):
    """Load a .pte with ExecuTorch's runtime, and return the program."""
    return Runtime.get().load_program(pte)


class Model(LoadedMethod):
    """The method `forward` of a loaded .pte. A call returns the list of outputs."""

    def __call__(self, *args) -> list[Any]:
        return self.execute(args)
