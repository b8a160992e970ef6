"""What in a `.pte` file is not portable: what ExecuTorch's own MLX delegate would compute differently."""

from __future__ import annotations

from collections.abc import Iterator

from ..serialization import ir
from ..serialization.listing import SlotNames
from ..serialization.portability import Finding, Problem, program_findings, shared_buffers
from .pte import Contents, Delegate


def file_findings(contents: Contents) -> dict[str, list[Finding]]:
    """Return the findings about each MLX program of a file, by method, and those about all methods, by "".

    Methods without findings have no entry. Raises ProgramError if the chains of a program are nested too deeply.
    """
    found: dict[str, list[Finding]] = {}
    for delegate in contents.delegates:
        findings = program_findings(delegate.graph, contents.named_data)
        findings += _order_findings(delegate)
        if findings:
            found.setdefault(delegate.method, []).extend(findings)
    graphs: dict[str, list] = {}
    for delegate in contents.delegates:
        graphs.setdefault(delegate.method, []).append(delegate.graph)
    if shared := shared_buffers(graphs):
        found[""] = shared
    return found


def _order_findings(delegate: Delegate) -> Iterator[Finding]:
    """Yield the inputs that are not row-major, and the outputs whose slots hold the elements in another order."""
    graph = delegate.graph
    names, inputs, outputs = SlotNames(graph), graph.input_map or [], graph.output_map or []
    for i, (slot, order) in enumerate(zip([*inputs, *outputs], delegate.orders)):
        if order is None or slot.slot_type != ir.SlotType.TensorSlot:
            continue
        held = tuple(graph.tensor_meta[slot.idx].dim_order or range(len(order))) if i >= len(inputs) else None
        if order != (held or tuple(range(len(order)))):
            kind = "input_order" if i < len(inputs) else "output_order"
            yield Finding(names(ir.Tid(slot.idx)), Problem(kind, str(list(order))))


def lines(found: dict[str, list[Finding]]) -> Iterator[str]:
    """Yield a line for each finding of `file_findings`."""
    for method, findings in found.items():
        for finding in findings:
            yield f"{method}: {finding}" if method else str(finding)
