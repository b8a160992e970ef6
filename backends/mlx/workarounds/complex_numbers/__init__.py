"""Complex tensors, as pairs of real tensors.

ExecuTorch's edge dialect has almost no operators for complex tensors, so that it refuses models that rotate embeddings
by complex numbers. `with_real_numbers` replaces each complex tensor by its real and its imaginary part.
"""

from __future__ import annotations

from torch.export import ExportedProgram

from . import fourier, rules
from .rewriter import NoRule, Rewriter, is_complex


def with_real_numbers(program: ExportedProgram) -> ExportedProgram:
    """Return a program that computes the same with real tensors.

    Returns `program` itself if it has no complex tensor, or has one where there is no rule: as input or output, or as
    operand of an operator that the rules lack.
    """
    if not any(is_complex(node.meta.get("val")) for node in program.graph.nodes):
        return program
    try:
        return Rewriter(program, rules.RULES | fourier.RULES).rewrite()
    except NoRule:
        return program
