"""Complex tensors, as pairs of real tensors.

ExecuTorch's edge dialect has almost no operators for complex tensors, so that it refuses models that rotate embeddings
by complex numbers. `with_real_numbers` replaces each complex tensor by its real and its imaginary part.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...extents import is_same_shape
from ..rewriter import NoRule, Rewriter, has_replaced
from . import fourier, rules
from .pair import Pair


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
