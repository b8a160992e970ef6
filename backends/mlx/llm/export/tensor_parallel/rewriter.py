"""Changes the graph of a method to that of one process of a group."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram

from ....custom_ops.distributed import all_gather, all_sum
from .analysis import Analysis, TensorSplit
from .layout import Segment, take

aten = torch.ops.aten
_NODE = torch.fx.Node


def rewritten(
    program: ExportedProgram, analysis: Analysis, parts: dict[str, torch.Tensor], rank: int, processes: int
) -> ExportedProgram:
    """Return the program of the process `rank`. `parts` has the tensors that are split, by name."""
    rewriter = Rewriter(program.graph, rank, processes)
    for edit in analysis.edits:
        edit(rewriter)
    graph, mode = rewriter.graph, detect_fake_mode([n.meta.get("val") for n in program.graph.nodes])
    for node in program.graph.nodes:
        name = analysis.names.get(node.name)
        if node.op == "placeholder" and name in analysis.tensors:
            rewriter[node].meta["val"] = mode.from_tensor(parts[name], static_shapes=True)
    _set_values(
        graph, mode, {rewriter[n] for n in program.graph.nodes if analysis.names.get(n.name) in analysis.tensors}
    )
    graph.lint()
    signature = copy.deepcopy(program.graph_signature)
    for old, new in zip(program.graph.output_node().args[0], graph.output_node().args[0]):
        if isinstance(old, _NODE) and old.name != new.name:
            signature.replace_all_uses(old.name, new.name)
    split = {name: part for name, part in parts.items() if name in analysis.tensors}
    state = {name: split.get(name, value) for name, value in program.state_dict.items()}
    constants = {name: split.get(name, value) for name, value in program.constants.items()}
    return program._update(
        torch.fx.GraphModule(program.graph_module, graph), signature, state_dict=state, constants=constants
    )


def _set_values(graph: torch.fx.Graph, mode, changed: set[_NODE]) -> None:
    """Compute the fake values of the nodes that depend on `changed`, and of new nodes."""
    with mode:
        for node in graph.nodes:
            if node.op != "call_function" or ("val" in node.meta and changed.isdisjoint(node.all_input_nodes)):
                continue
            changed.add(node)
            arguments, options = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*arguments, **options)


def part_of(tensor: torch.Tensor, split: TensorSplit, rank: int, processes: int) -> torch.Tensor:
    """Return the part of a weight or buffer that the process `rank` has."""
    part = take(tensor, split.axis, split.segments, rank, processes, split.scale)
    return torch.nn.Parameter(part, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else part


class Rewriter:
    """A copy of a graph for the process `rank` of `processes`.

    Its methods take nodes of the original graph. Only the argument `new` of `replace_input` is a node of the copy.
    """

    def __init__(self, graph: torch.fx.Graph, rank: int, processes: int):
        self.graph, self.rank, self.processes = torch.fx.Graph(), rank, processes
        self._nodes: dict[_NODE, _NODE] = {}
        output = self.graph.graph_copy(graph, self._nodes, return_output_node=True)
        results, original = output
        self.graph.output(results).meta.update(original.meta)

    def __getitem__(self, node: _NODE) -> _NODE:
        return self._nodes[node]

    def replace_input(self, node: _NODE, old: _NODE, new: _NODE) -> None:
        self[node].replace_input_with(self[old], new)

    def slices(self, tensor: _NODE, axis: int, segments: Sequence[Segment]) -> _NODE:
        """Return a node with the part of the whole `tensor` that this process has."""
        source = self[tensor]
        parts, offset = [], 0
        with self.graph.inserting_after(source):
            for segment in segments:
                begin = offset + segment.begin(self.rank, self.processes)
                end = begin + segment.local_size(self.processes)
                parts.append(self.graph.call_function(aten.slice.Tensor, (source, axis, begin, end)))
                offset += segment.size
        if len(parts) == 1:
            return parts[0]
        # Each part was inserted directly after `source`. The first part is therefore the last one in the graph.
        with self.graph.inserting_after(parts[0]):
            return self.graph.call_function(aten.cat.default, (parts, axis))

    def set_size(self, node: _NODE, axis: int, size: int) -> None:
        """Set the size at `axis` in the arguments of `node`, a view or an expand."""
        sizes = list(self[node].args[1])
        sizes[axis] = size
        self[node].update_arg(1, sizes)

    def set_argument(self, node: _NODE, index: int, value) -> None:
        self[node].update_arg(index, value)

    def set_slice(self, node: _NODE, begin: int, length: int) -> None:
        x, dim, _, _, *step = self[node].args
        self[node].args = (x, dim, begin, begin + length, *step)

    def set_split(self, node: _NODE, sizes: Sequence[int], dim: int) -> None:
        self[node].target, self[node].args = aten.split_with_sizes.default, (self[node].args[0], list(sizes), dim)

    def _add_after(self, node: _NODE, build) -> None:
        """Add nodes after `node`, and replace all uses of `node` by the node that `build` returns.

        `build(call, copy)` gets a function and the copy of `node`. `call(target, *args)` adds a node and returns it.
        """
        new = self[node]
        users = list(new.users)
        last = new

        def call(target, *arguments):
            nonlocal last
            with self.graph.inserting_after(last):
                last = self.graph.call_function(target, arguments)
            return last

        result = build(call, new)
        for user in users:
            user.replace_input_with(new, result)

    def sum_after(self, node: _NODE, bias: int | None) -> None:
        """Add the results of all processes, then the bias. `bias` is its index in the arguments of `node`, or None."""
        new = self[node]
        added = None if bias is None else new.args[bias]
        if new.target == aten.addmm.default:
            new.target, new.args = aten.mm.default, new.args[1:]
        elif bias is not None:
            new.args = new.args[:bias]

        def build(call, x):
            total = call(all_sum, x, self.rank, self.processes)
            return total if added is None else call(aten.add.Tensor, total, added)

        self._add_after(node, build)

    def mean_after(self, node: _NODE) -> None:
        """Average the results of all processes, which are means over parts of the same size."""
        self._add_after(
            node, lambda call, x: call(aten.mul.Tensor, call(all_sum, x, self.rank, self.processes), 1 / self.processes)
        )

    def gather_after(self, node: _NODE, axis: int, size: int) -> None:
        """Concatenate the results of all processes along `axis`, up to `size` entries."""
        self._add_after(
            node,
            lambda call, x: call(
                aten.slice.Tensor, call(all_gather, x, axis, self.rank, self.processes), axis, 0, size
            ),
        )

    def look_up(self, node: _NODE, indices: _NODE, rows: int) -> None:
        """Look up only the indices of the `rows` rows that this process has, and add the results of all processes."""
        source, new = self[indices], self[node]
        with self.graph.inserting_before(new):
            shifted = self.graph.call_function(aten.sub.Tensor, (source, self.rank * rows))
            is_above = self.graph.call_function(aten.ge.Scalar, (shifted, 0))
            is_below = self.graph.call_function(aten.lt.Scalar, (shifted, rows))
            is_here = self.graph.call_function(aten.logical_and.default, (is_above, is_below))
            here = self.graph.call_function(aten.clamp.default, (shifted, 0, rows - 1))
        new.replace_input_with(source, here)

        def build(call, x):
            mask = call(aten.unsqueeze.default, is_here, -1)
            return call(all_sum, call(aten.where.ScalarOther, mask, x, 0), self.rank, self.processes)

        self._add_after(node, build)
