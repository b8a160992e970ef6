"""The report on a `.pte` file. It consists of JSON values, and `executorch-mlx inspect --json` prints it as it is.

The modules `render_text` and `render_graph` make text and a graph of the report.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..serialization import ir
from ..serialization.infer_types import TypedInstruction, declared_type, infer_types
from ..serialization.listing import (
    SPACES,
    ListedInstruction,
    Slot,
    SlotNames,
    list_instructions,
    list_replacements,
    space_of,
    tensor_ids,
)
from ..serialization.types import Type
from .peak_memory import peak_of_temporaries
from .pte import Contents, Delegate


def report(contents: Contents, delegates: list[Delegate]) -> dict[str, Any]:
    """Return the description of a file and of `delegates`, which are some or all of its delegates."""
    return {
        "file": {"bytes": contents.size, "methods": contents.methods},
        "outside": {method: calls for method, calls in contents.calls_outside_mlx.items() if calls},
        "delegates": [describe(d, contents.named_data) for d in delegates],
    }


def describe(delegate: Delegate, named_data: dict[str, int]) -> dict[str, Any]:
    """Return the description of one delegate. `named_data` maps a key to the size of the stored data in bytes."""
    graph = delegate.graph
    names = SlotNames(graph)
    typed = {(t.instruction.chain, t.instruction.index): t for t in infer_types(graph)}
    chains = list_instructions(graph)
    peak = peak_of_temporaries(graph)
    tensors = [_describe_tensor(graph, names, tid, named_data) for tid in range(tensor_ids(graph)["temporary"].start)]
    sizes = {space: [t["bytes"] for t in tensors if t["space"] == space] for space in SPACES}
    return {
        "method": delegate.method,
        "index": delegate.index,
        "version": graph.version,
        "payload_bytes": len(delegate.payload),
        "instructions": sum(map(len, chains)),
        "main_chain": graph.main_chain_idx,
        "init_chain": graph.init_chain_idx if graph.init_chain_idx >= 0 else None,
        "constants": {"count": graph.num_constant_tensors, "bytes": sum(b or 0 for b in sizes["constant"])},
        "buffers": {"count": graph.num_mutable_buffer_tensors, "bytes": sum(b or 0 for b in sizes["buffer"])},
        "temporaries": {
            "count": graph.num_temp_tensors,
            "peak_bytes": peak.nbytes,
            "peak_at": [peak.at.chain, peak.at.index] if peak.at else None,
            "of_unknown_size": peak.unknown,
        },
        "values": graph.num_values,
        "ops": dict(Counter(instruction.op for chain in chains for instruction in chain).most_common()),
        "inputs": [_describe_interface_slot(names, tensors, s) for s in graph.input_map or ()],
        "outputs": [_describe_interface_slot(names, tensors, s) for s in graph.output_map or ()],
        "tensors": tensors,
        "replacements": [
            {"chain": i.chain, "first": i.index, "count": count, "instruction": _describe_instruction(names, i, None)}
            for i, count in list_replacements(graph)
        ],
        "chains": [[_describe_instruction(names, i, typed.get((i.chain, i.index))) for i in chain] for chain in chains],
    }


def _describe_tensor(graph: ir.MLXGraph, names: SlotNames, tid: int, named_data: dict[str, int]) -> dict[str, Any]:
    metas = graph.tensor_meta or []
    meta = metas[tid] if tid < len(metas) else None
    type_ = declared_type(meta) if meta else Type()
    key = names.keys.get(tid)
    bounds = [_bounds(d) for d in meta.shape] if meta else []
    return {
        "id": tid,
        "space": space_of(graph, tid),
        "name": names(ir.Tid(tid)),
        "key": key,
        "type": str(type_),
        **_describe_type(type_),
        "bounds": bounds if any(bounds) else None,
        "bytes": declared_type(meta, upper_bound=True).nbytes if meta else None,
        "stored_bytes": named_data.get(key),
    }


def _bounds(dim: ir.ShapeDim) -> list[int | None] | None:
    """Return [lower, upper], the bounds of a dynamic extent, or None for a static extent. `upper` may be None."""
    return [dim.min_value, dim.max_value if dim.max_value >= 0 else None] if dim.value < 0 else None


def _describe_type(type_: Type) -> dict[str, Any]:
    return {"shape": None if type_.shape is None else list(type_.shape), "dtype": type_.dtype}


def _describe_interface_slot(names: SlotNames, tensors: list[dict], variant: ir.SlotVariant) -> dict[str, Any]:
    if variant.slot_type == ir.SlotType.TensorSlot:
        type_ = tensors[variant.idx]["type"] if variant.idx < len(tensors) else "?"
        return {"slot": names(ir.Tid(variant.idx)), "type": type_}
    return {"slot": names(ir.Vid(variant.idx)), "type": variant.slot_type.name.removesuffix("ValueSlot").lower()}


def _describe_instruction(
    names: SlotNames, instruction: ListedInstruction, typed: TypedInstruction | None
) -> dict[str, Any]:
    """Return the description of an instruction. `typed` is None if the instruction can never run."""
    results = []
    for slot in instruction.results:
        is_tensor = isinstance(slot, ir.Tid)
        type_ = str(typed.results.get(slot.idx, Type())) if is_tensor and typed else "?" if is_tensor else "int"
        results.append(_describe_slot(names, slot) | {"type": type_})
    return {
        "index": instruction.index,
        "op": instruction.op,
        "results": results,
        "operands": {name: _describe_operand(names, value, typed) for name, value in instruction.operands.items()},
        "attributes": instruction.attributes,
        "chains": instruction.chains,
    }


def _describe_slot(names: SlotNames, slot: Slot) -> dict[str, Any]:
    kind = "value" if isinstance(slot, ir.Vid) else "tensor"
    return {kind: slot.idx, "name": names(slot)}


def _describe_operand(names: SlotNames, value: Any, typed: TypedInstruction | None) -> Any:
    if isinstance(value, list):
        return [_describe_operand(names, v, typed) for v in value]
    if isinstance(value, ir.Vid):
        return _describe_slot(names, value)
    if isinstance(value, ir.Tid):
        return _describe_slot(names, value) | {"type": str(typed.operands[value.idx]) if typed else "?"}
    return value
