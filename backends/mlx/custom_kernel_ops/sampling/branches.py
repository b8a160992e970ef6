"""Branches of the traced graph: from a fast version to the next one, and on parameters that may be None."""

from __future__ import annotations

import torch

UNSURE = -1  # in place of a token
SHORT_VOCABULARY = 8192  # up to this size, it is faster to look at all tokens than to search for candidates


def cond(predicate, true_fn, false_fn, *operands):
    """Call `torch.cond` with operands that may be None, and return the one tensor that the branch returns."""

    def branch(function):
        def run(*tensors):
            rest = iter(tensors)
            return (function(*[None if o is None else next(rest) for o in operands]),)

        return run

    given = tuple(o for o in operands if o is not None)
    return torch.ops.higher_order.cond(predicate, branch(true_fn), branch(false_fn), given)[0]


def or_else(next_version, tokens, *operands):
    """Return `tokens` if none of them is UNSURE, else `next_version(*operands)`.

    The host waits for the predicate before it chooses a branch. The predicate depends on `tokens`, so the tokens are
    computed by then: reading them later takes no second wait.
    """
    return cond(
        (tokens >= 0).all(), lambda tokens, *_: tokens.clone(), lambda _, *rest: next_version(*rest), tokens, *operands
    )
