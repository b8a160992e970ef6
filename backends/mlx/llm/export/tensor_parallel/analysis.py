"""A walk over the graph of a method. It finds which tensors are split, and how the graph of a process differs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch.export import ExportedProgram

from .layout import CannotSplit, Refine, Segment, Split
from .products import Lookup, Product, lookup_of, product_of

aten = torch.ops.aten

# A function that changes the graph of a process, given the `Rewriter` of this graph.
Edit = Callable[[Any], None]
# A function that derives the split of an operator's result; rules.py describes it.
Rule = Callable[["Analysis", torch.fx.Node], Split | list | None]


@dataclass(frozen=True)
class TensorSplit:
    """How a weight or a buffer is split along `axis`.

    `scale` is the number of elements of this axis for each entry of a segment.
    """

    axis: int
    segments: tuple[Segment, ...]
    scale: Fraction = Fraction(1)


@dataclass
class Layouts:
    """What the walks so far have found out.

    - `segments`: the name of a weight → the segments of its outputs. A weight that is missing has one segment.
    - `whole`: the name of a weight that stays whole → the reason.
    """

    processes: int
    vocab_size: int
    segments: dict[str, tuple[Segment, ...]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    seen: int = 0  # the number of weights in `whole` when the last walk failed


class Analysis:
    """A walk and its result.

    The constructor walks over the graph. It raises Refine or CannotSplit if another walk with other `layouts` is
    necessary. The message of CannotSplit says why. `rule_of` returns the rule for a node, or raises CannotSplit.

    Attributes:

    - `tensors`: how each weight or buffer that is split is split, by name.
    - `edits`: the changes of the graph.
    - `product_weights`: the names of the weights that matrix products use.
    - `whole_attentions`: the number of attention operators that are not split.
    """

    def __init__(self, program: ExportedProgram, layouts: Layouts, rule_of: Callable[[torch.fx.Node], Rule]):
        self.layouts, self.processes, self.rule_of = layouts, layouts.processes, rule_of
        self.splits: dict[torch.fx.Node, Any] = {}  # a `Split`, None, or a list of these for several results
        self.tensors: dict[str, TensorSplit] = {}
        self.edits: list[Edit] = []
        self.product_weights: set[str] = set()
        self.whole_attentions = 0
        signature = program.graph_signature
        self.names = {
            **signature.inputs_to_parameters, **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }  # fmt: skip
        products = [(node, product) for node in program.graph.nodes if (product := product_of(node)) is not None]
        large = [node for node, product in products if product.outputs >= layouts.vocab_size]
        self.logits = large[-1] if large else None  # the product that computes the logits
        for node in program.graph.nodes:
            if node.op in ("call_function", "output"):
                self._visit(node)
        self._check_sizes()

    # Facts about nodes ------------------------------------------------------------------

    def split_of(self, node: Any) -> Split | None:
        """Return how the tensor of `node` is split, or None if the tensor is whole or `node` is not a tensor."""
        found = self.splits.get(node) if isinstance(node, torch.fx.Node) else None
        return found if isinstance(found, Split) else None

    def name_of(self, node: torch.fx.Node) -> tuple[str, list[int]] | None:
        """Return the name of the weight or buffer `node`, and which of its axes each axis of `node` is.

        `node` may be a transpose of the weight. Returns None if `node` is something else.
        """
        if node.op == "placeholder":
            name = self.names.get(node.name)
            return None if name is None else (name, list(range(len(shape_of(node)))))
        if node.target in (aten.alias.default, aten.detach.default, aten.detach_.default):
            return self.name_of(node.args[0])
        if node.target in _TRANSPOSES:
            found = self.name_of(node.args[0])
            if found is None:
                return None
            name, axes = found
            return name, [axes[axis] for axis in permutation_of(node)]
        return None

    def is_constant(self, node: torch.fx.Node) -> bool:
        """Whether `node` is computed from weights only, or looks up entries of such a tensor."""
        if node.op == "placeholder":
            return node.name in self.names
        if node.op != "call_function":
            return False
        if node.target in (aten.index.Tensor, aten.index_select.default):
            return self.is_constant(node.args[0])
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        return bool(inputs) and all(map(self.is_constant, inputs))

    # Changes ----------------------------------------------------------------------------

    def split_tensor(self, node: torch.fx.Node, axis: int, segments: tuple[Segment, ...], scale=Fraction(1)) -> None:
        """Split the weight or buffer `node` along `axis`."""
        name, axes = self.name_of(node)
        new = TensorSplit(axes[axis], segments, scale)
        old = self.tensors.setdefault(name, new)
        old_segments, new_segments = _sizes_and_copies(old.segments), _sizes_and_copies(new.segments)
        if (old.axis, old.scale, old_segments) != (new.axis, new.scale, new_segments):
            raise CannotSplit(f"{name} is used in two ways")

    def localize(self, node: torch.fx.Node, argument: torch.fx.Node, axis: int, split: Split) -> None:
        """Replace the constant argument `argument` of `node` by the part of it that belongs to the process."""
        if not self.is_constant(argument):
            raise CannotSplit(f"{node.target} combines a part with a whole tensor")
        self.edits.append(lambda r: r.replace_input(node, argument, r.slices(argument, axis, split.segments)))

    def localize_operands(self, node: torch.fx.Node, operands: Iterable[torch.fx.Node], split: Split) -> None:
        """Replace the whole operands of `node` by their parts, except those that broadcast along the split axis.

        `split` is the split of the result. The operands are aligned with the result at their last axes.
        """
        rank = len(shape_of(node))
        for n in operands:
            axis = split.axis - (rank - len(shape_of(n)))
            if self.split_of(n) is None and axis >= 0 and shape_of(n)[axis] != 1:
                self.localize(node, n, axis, split)

    # The walk ---------------------------------------------------------------------------

    def _visit(self, node: torch.fx.Node) -> None:
        inputs = [split for n in node.all_input_nodes if (split := self.splits.get(n)) is not None]
        try:
            if node.target is operator.getitem:
                source = self.splits.get(node.args[0])
                self.splits[node] = source[node.args[1]] if isinstance(source, list) else source
            elif (product := product_of(node)) is not None:
                self.splits[node] = self._visit_product(node, product)
            elif (lookup := lookup_of(node)) is not None and not inputs:
                self._visit_lookup(node, lookup)
            elif inputs:
                self.splits[node] = self.rule_of(node)(self, node)
            elif node.target == torch.ops.mlx.cached_attention.default:
                self._check_whole_query(node.args[0])
                self.whole_attentions += 1
        except CannotSplit as error:
            self._keep_whole(_sources(inputs), str(error))
            raise

    def _check_whole_query(self, query: torch.fx.Node) -> None:
        """Raise CannotSplit if products whose inputs are split compute the whole `query`.

        The next walk then keeps these inputs whole, so that it can split the products by their outputs.
        """
        nodes, seen, sources = [query], set(), set()
        while nodes:
            node = nodes.pop()
            product = product_of(node)
            if product is not None and (x := self.split_of(product.x)) is not None:
                sources |= x.sources
            elif product is None:
                nodes += [n for n in node.all_input_nodes if n not in seen]
            seen.add(node)
        if sources:
            reason = "it computes the inputs of a product that is split by its outputs"
            self._keep_whole(sources, reason)
            raise CannotSplit(reason)

    def _keep_whole(self, sources: Iterable[str], reason: str) -> None:
        for source in sources:
            self.layouts.whole.setdefault(source, reason)

    def _visit_product(self, node: torch.fx.Node, product: Product) -> Split | None:
        x = self.split_of(product.x)
        found = self.name_of(product.operands[0].node)
        if found is None:
            if x is not None:
                raise CannotSplit(f"{node.target} multiplies by something else than a weight")
            return None
        name = found[0]
        self.product_weights.add(name)
        if x is not None:
            return self._visit_product_of_part(node, product, x, name)
        if node is self.logits:
            return self._gather_logits(node, product)
        if name in self.layouts.whole:
            return None
        layout = self.layouts.segments.get(name, (Segment(product.outputs),))
        segments = tuple(replace(s, origins=frozenset({(name, i)})) for i, s in enumerate(layout))
        split = Split(len(shape_of(node)) - 1, segments, Fraction(1), frozenset({name}))
        self._split_outputs(node, product, split)
        return split

    def _split_outputs(self, node: torch.fx.Node, product: Product, split: Split) -> None:
        for operand in product.operands:
            self.split_tensor(operand.node, operand.out_axis, split.segments)
        if product.bias is not None:
            bias = node.args[product.bias]
            self.localize(node, bias, len(shape_of(bias)) - 1, split)

    def _gather_logits(self, node: torch.fx.Node, product: Product) -> None:
        """Compute a part of the vocabulary in each process."""
        segments = self._vocabulary(product.outputs)
        axis = len(shape_of(node)) - 1
        self._split_outputs(node, product, Split(axis, segments, Fraction(1), frozenset()))
        self.edits.append(lambda r: r.gather_after(node, axis, product.outputs))

    def _vocabulary(self, rows: int) -> tuple[Segment, ...]:
        """Return the segment of an axis of the vocabulary, rounded up to a multiple of the number of processes."""
        return (Segment(-(-rows // self.processes) * self.processes),)

    def _visit_product_of_part(self, node: torch.fx.Node, product: Product, x: Split, name: str) -> Split | None:
        last = len(shape_of(product.x)) - 1
        if x.axis != last:
            if len(shape_of(node)) != last + 1 or len(product.operands[0].node.meta["val"].shape) != 2:
                raise CannotSplit(f"{node.target} has a split axis that is not multiplied")
            return x
        for segment in x.segments:
            if segment.copies > 1:
                raise CannotSplit(f"{name} multiplies something that several processes have")
            if segment.size % self.processes or segment.local_size(self.processes) % product.group:
                raise CannotSplit(
                    f"{segment.size} inputs of {name} cannot be split among {self.processes} processes"
                    + (f" in groups of {product.group}" if product.group > 1 else "")
                )
        for operand in product.operands:
            self.split_tensor(operand.node, operand.in_axis, x.segments, operand.per_input)
        self.edits.append(lambda r: r.sum_after(node, product.bias))
        return None

    def _visit_lookup(self, node: torch.fx.Node, lookup: Lookup) -> None:
        if lookup.rows < self.layouts.vocab_size or any(self.name_of(o.node) is None for o in lookup.operands):
            return
        segments = self._vocabulary(lookup.rows)
        for operand in lookup.operands:
            self.split_tensor(operand.node, operand.out_axis, segments)
        rows = segments[0].local_size(self.processes)
        self.edits.append(lambda r: r.look_up(node, lookup.indices, rows))

    def _check_sizes(self) -> None:
        """Raise Refine or CannotSplit if the processes cannot have equal parts of every segment."""
        for found in self.splits.values():
            for split in found if isinstance(found, list) else [found]:
                if split is not None:
                    self._check_size(split)

    def _check_size(self, split: Split) -> None:
        for segment in split.segments:
            if segment.size * segment.copies % self.processes == 0:
                continue
            # There are more processes than entries, such as key heads: several processes get the same entry.
            if self.processes % segment.size == 0 and segment.copies == 1:
                copies = self.processes // segment.size
                for weight, index in segment.origins:
                    whole = Segment(int(segment.size * split.unit), copies)
                    raise Refine(weight, index, (whole,))
            reason = f"{segment.size} does not divide by {self.processes} processes"
            self._keep_whole(split.sources, reason)
            raise CannotSplit(reason)


def _sizes_and_copies(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    return [(segment.size, segment.copies) for segment in segments]


def _sources(splits: Iterable[Any]) -> set[str]:
    found: set[str] = set()
    for split in splits:
        for each in split if isinstance(split, list) else [split]:
            found |= each.sources if each is not None else set()
    return found


def shape_of(node: torch.fx.Node) -> torch.Size:
    return node.meta["val"].shape


_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default, aten.mT.default)


def permutation_of(node: torch.fx.Node) -> list[int]:
    """Return for each axis of a transposed tensor which axis of the operand it is."""
    rank = len(shape_of(node))
    axes = list(range(rank))
    if node.target == aten.permute.default:
        return [axis % rank for axis in node.args[1]]
    if node.target == aten.numpy_T.default:
        return axes[::-1]
    first, second = (a % rank for a in node.args[1:3]) if node.target == aten.transpose.int else (rank - 2, rank - 1)
    axes[first], axes[second] = axes[second], axes[first]
    return axes


_SYMBOL = 7919  # stands for every dynamic size where products of sizes are compared: a prime that divides no usual size


def sizes_of(node: torch.fx.Node) -> list[int]:
    """Return the sizes of a tensor as integers. `_SYMBOL` takes the place of every symbol."""
    return [_size(size) for size in shape_of(node)]


def _size(size) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs({symbol: _SYMBOL for symbol in expression.free_symbols}))
