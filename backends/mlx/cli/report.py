"""A program as one plain tree of dicts, lists and strings: what --json prints, and what the text is made of."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..serialization import ir
from .listing import SPACES, Names, Row, Slot, rows, space_of, spaces
from .pte import Contents, Delegate
from .types import Type
from .walk import peak_of_temporaries, persistent_type, walk


def report(contents: Contents, delegates: list[Delegate]) -> dict[str, Any]:
    return {
        "file": {"bytes": contents.size, "methods": contents.methods},
        "outside": {method: calls for method, calls in contents.others.items() if calls},
        "delegates": [describe(d, contents.named_data) for d in delegates],
    }


def describe(delegate: Delegate, named_data: dict[str, int]) -> dict[str, Any]:
    graph = delegate.graph
    names = Names(graph)
    steps = {(s.row.chain, s.row.index): s for s in walk(graph)}
    chains = rows(graph)
    peak = peak_of_temporaries(graph)
    tensors = [_tensor(graph, names, tid, named_data) for tid in range(spaces(graph)[3].stop)]
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
        "ops": dict(Counter(row.op for chain in chains for row in chain).most_common()),
        "inputs": [_variant(names, tensors, s) for s in graph.input_map or ()],
        "outputs": [_variant(names, tensors, s) for s in graph.output_map or ()],
        "tensors": tensors,
        "chains": [[_instruction(names, row, steps.get((row.chain, row.index))) for row in chain] for chain in chains],
    }


def _tensor(graph: ir.MLXGraph, names: Names, tid: int, named_data: dict[str, int]) -> dict[str, Any]:
    metas = graph.tensor_meta or []
    meta = metas[tid] if tid < len(metas) else None
    type_ = persistent_type(meta) if meta else Type()
    key = names.keys.get(tid)
    bounds = [_bounds(d) for d in meta.shape] if meta else []
    return {
        "id": tid,
        "space": space_of(graph, tid),
        "name": names(ir.Tid(tid)),
        "key": key,
        "type": str(type_),
        **_type(type_),
        "bounds": bounds if any(bounds) else None,
        "bytes": persistent_type(meta, largest=True).nbytes if meta else None,
        "stored_bytes": named_data.get(key),
    }


def _bounds(dim: ir.ShapeDim) -> list[int | None] | None:
    """[lowest, highest] of a dynamic extent."""
    return [dim.min_value, dim.max_value if dim.max_value >= 0 else None] if dim.value < 0 else None


def _type(type_: Type) -> dict[str, Any]:
    return {"shape": None if type_.shape is None else list(type_.shape), "dtype": type_.dtype}


def _variant(names: Names, tensors: list[dict], variant: ir.SlotVariant) -> dict[str, Any]:
    if variant.slot_type == ir.SlotType.TensorSlot:
        type_ = tensors[variant.idx]["type"] if variant.idx < len(tensors) else "?"
        return {"slot": names(ir.Tid(variant.idx)), "type": type_}
    return {"slot": names(ir.Vid(variant.idx)), "type": variant.slot_type.name.removesuffix("ValueSlot").lower()}


def _instruction(names: Names, row: Row, step) -> dict[str, Any]:
    """`step` is None where no chain that runs leads to the row."""
    made = step.results if step else []
    results = []
    for i, slot in enumerate(row.results):
        type_ = "int" if isinstance(slot, ir.Vid) else str(made[i]) if i < len(made) else "?"
        results.append(_slot(names, slot) | {"type": type_})
    operands = {name: _operand(names, value, step) for name, value in row.operands.items()}
    return {
        "index": row.index,
        "op": row.op,
        "results": results,
        "operands": operands,
        "attributes": row.attributes,
        "chains": row.chains,
    }


def _slot(names: Names, slot: Slot) -> dict[str, Any]:
    kind = "value" if isinstance(slot, ir.Vid) else "tensor"
    return {kind: slot.idx, "name": names(slot)}


def _operand(names: Names, value: Any, step) -> Any:
    if isinstance(value, list):
        return [_operand(names, v, step) for v in value]
    if isinstance(value, ir.Vid):
        return _slot(names, value)
    if isinstance(value, ir.Tid):
        known = step.operands.get(value.idx) if step else None
        return _slot(names, value) | {"type": str(known) if known else "?"}
    return value
