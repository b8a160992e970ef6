"""Keeps dynamic dimensions dynamic where ExecuTorch would make them static, with the size of the example.

There are two causes, both in the conversion to the edge dialect:

- The verifier takes the length of the first result of an operator that returns a list of tensors. The length of a
  tensor is a Python integer. Splits are therefore decomposed to slices: a slice is one tensor.
- The operator of the edge dialect for `empty` takes integers as sizes. `empty` is therefore replaced by `full`.

`static_dimensions` finds what other operators do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Node
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


# -- decompositions ---------------------------------------------------------------


def _split(x: torch.Tensor, split_size: int | torch.SymInt, dim: int = 0) -> list[torch.Tensor]:
    extent = x.shape[dim]
    full = max(int((extent + split_size - 1) // split_size) - 1, 0)
    return _split_with_sizes(x, [split_size] * full + [extent - full * split_size], dim)


def _split_with_sizes(x: torch.Tensor, split_sizes: list[int | torch.SymInt], dim: int = 0) -> list[torch.Tensor]:
    parts, start = [], 0
    for size in split_sizes:
        parts.append(aten.slice.Tensor(x, dim, start, start + size))
        start += size
    return parts


def _unbind(x: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    return [aten.select.int(x, dim, index) for index in range(x.shape[dim])]


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> torch.Tensor:
    return aten.full.default(size, 0, dtype=dtype or torch.get_default_dtype(), device=device)


def _new_empty(x, size, *, dtype=None, layout=None, device=None, pin_memory=None) -> torch.Tensor:
    return aten.full.default(size, 0, dtype=dtype or x.dtype, device=device or x.device)


_EMPTY: dict[Any, Callable] = {aten.empty.memory_format: _empty, aten.new_empty.default: _new_empty}
_SPLITS: dict[Any, Callable] = {
    aten.split.Tensor: _split,
    aten.split_copy.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.split_with_sizes_copy.default: _split_with_sizes,
    aten.unbind_copy.int: _unbind,
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: _split_with_sizes,
}
# Operators whose decomposition calls one of the above.
_COMPOSED = (aten.gru_cell.default, aten.lstm_cell.default, aten.pad.default, aten._pad_circular.default)


def decompositions(nodes: Iterator[Node]) -> dict[torch._ops.OpOverload, Callable]:
    """Return the decompositions of the operators of `nodes` that would make a dynamic dimension static."""
    if not any(_needs_decomposition(node) for node in nodes):
        return {}
    defaults = default_decompositions()
    return _EMPTY | _SPLITS | {target: defaults[target] for target in _COMPOSED}


def _needs_decomposition(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is aten.pad.default and "circular" not in (*node.args, *node.kwargs.values()):
        return False
    if node.target in _EMPTY or node.target in _COMPOSED:
        return any(_is_dynamic(x) for x in tree_leaves(node.meta.get("val")))
    return _returns_list_of_dynamic(node)


def _returns_list_of_dynamic(node: Node) -> bool:
    """Whether `node` splits a tensor into parts, and the first dimension of the first part is dynamic."""
    parts = node.meta.get("val")
    returns = node.target._schema.returns
    splits = len(returns) == 1 and str(returns[0].type) == "List[Tensor]"
    return splits and len(parts) > 0 and parts[0].ndim > 0 and isinstance(parts[0].shape[0], torch.SymInt)


def _is_dynamic(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in x.shape)


# -- warnings ---------------------------------------------------------------------


def static_dimensions(program: ExportedProgram) -> list[str]:
    """Return a sentence for each dimension of an input that was dynamic and is now static."""
    suspect = next((n for n in program.graph.nodes if n.op == "call_function" and _is_suspect(n)), None)
    operator = "an operator" if suspect is None else _name(suspect.target)
    return [
        f"input {node.name}, dimension {axis}: {operator} made it static, with the size {size} of the example; "
        "to_edge_transform_and_lower keeps dimensions dynamic that to_edge makes static"
        for node, axis, size in _input_sizes(program)
        if size.node.expr.is_number
    ]


def _input_sizes(program: ExportedProgram) -> Iterator[tuple[Node, int, torch.SymInt]]:
    """Yield the inputs of `program`, and their dimensions that are or were dynamic."""
    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in inputs and isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    yield node, axis, size


def _is_suspect(node: Node) -> bool:
    """Whether this node of the edge dialect is one that ExecuTorch makes static: see the top of this file."""
    value = node.meta.get("val")
    if "empty" in _name(node.target):
        return any(not isinstance(operand.meta.get("val"), torch.Tensor) for operand in node.all_input_nodes)
    sizes = [size for x in tree_leaves(value) if isinstance(x, torch.Tensor) for size in x.shape]
    is_static = any(isinstance(size, torch.SymInt) and size.node.expr.is_number for size in sizes)
    return isinstance(value, (list, tuple)) and is_static


def _name(target: Any) -> str:
    """Return the name of the ATen operator `target`, also of one in the edge dialect."""
    return str(getattr(target, "_op", target))
