"""Complex tensors, as pairs of real tensors.

ExecuTorch's edge dialect has almost no operators for complex tensors, so that it refuses models that rotate embeddings
by complex numbers. `with_real_numbers` replaces each complex tensor by its real and its imaginary part.
"""

from __future__ import annotations

import operator
import warnings

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...extents import is_same_shape
from ..rewriter import NoRule, Rewriter, has_replaced
from . import fourier, rules
from .pair import Pair

_WITHOUT_COMPUTATION = (operator.getitem, torch.ops.aten._assert_tensor_metadata.default)


def with_real_numbers(program: ExportedProgram) -> ExportedProgram:
    """Return a program that computes the same with real tensors.

    Returns `program` itself if it has no complex tensor, or has one where there is no rule: as input or output, or as
    operand of an operator that the rules lack.
    """
    if not any(has_replaced(node, torch.is_complex) for node in program.graph.nodes):
        return program
    try:
        return _ComplexRewriter(program).rewrite()
    except NoRule:
        return program


def check_complex_operators(program: ExportedProgram) -> None:
    """Raise ValueError if ExecuTorch would refuse or could not run an operator of complex tensors in `program`.

    ExecuTorch itself would not name the remedy. Only warns if its kernels can run the operators, and there are no rules
    for them: its verifier, which refuses them, can be turned off.
    """
    if not any(has_replaced(node, torch.is_complex) for node in program.graph.nodes):
        return
    nodes = [
        node
        for node in program.run_decompositions().graph.nodes
        if node.op == "call_function"
        and node.target not in _WITHOUT_COMPUTATION
        and has_replaced(node, torch.is_complex)
    ]
    missing = [node for node in nodes if torch.Tag.core not in getattr(node.target, "tags", ())]
    node_without_rule = _node_without_rule(program)
    for node in (missing or nodes)[:1]:
        message = f"{node.target} ({node.name}): {_reason(node_without_rule)}"
        if missing or node_without_rule is None:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)


def _node_without_rule(program: ExportedProgram) -> Node | None:
    """Return the first node with complex tensors for which there is no rule, or None if there is a rule for each."""
    rewriter = _ComplexRewriter(program)
    try:
        rewriter.rewrite()
    except NoRule:
        return rewriter.node
    return None


def _reason(node: Node | None) -> str:
    reason = "ExecuTorch does not support complex operands or results of this operator"
    if node is None:
        return f'{reason}; MLXPartitioner(legalize=("complex",)) computes with pairs of real tensors'
    what = node.target if node.op == "call_function" else f"a complex {node.op}"
    return (
        f'{reason}, and legalize=("complex",) has no rule for {what} ({node.name}); let inputs and outputs be '
        "torch.view_as_real(x), and compute the real and the imaginary part as two tensors"
    )


class _ComplexRewriter(Rewriter):
    """Replaces each complex tensor by a `Pair`."""

    rules = rules.RULES | fourier.RULES
    is_replaced = staticmethod(torch.is_complex)

    def split(self, name: str, tensor: torch.Tensor) -> Pair:
        return Pair(*(self.constant(f"{name}_{part}", getattr(tensor, part)) for part in ("real", "imag")))

    def checked(self, value: Node | Pair) -> Node | Pair:
        if isinstance(value, Pair):
            return Pair(self._checked(value.real), self._checked(value.imag))
        return self._checked(value)

    def _checked(self, part: Node) -> Node:
        """Return a part of the result of `node`, cast to its dtype. Raises `NoRule` if the part has another shape."""
        expected = self.node.meta["val"]
        if not isinstance(expected, torch.Tensor):  # a list of tensors, or a size
            return part
        if not is_same_shape(part.meta["val"].shape, expected.shape):
            raise NoRule
        return self.cast(part, expected.dtype.to_real())
