"""The most likely token: three versions of the exact argmax."""

from __future__ import annotations

import torch

from .branches import UNSURE, or_else
from .logits import pick, replace_nan, split_blocks, split_columns


def greedy(logits, temperature, top_p, seed, top_k, min_p):
    """Search the column with the largest maximum. The result is sure if exactly one column has this maximum."""
    columns = split_columns(logits, 64)
    maxima = columns.amax(1)
    column = maxima.argmax(-1, keepdim=True)
    tokens = pick(columns, column).argmax(-1) * columns.shape[2] + column.squeeze(1)
    # The number of columns with the largest maximum: more than 1 if columns are tied. It is 0 if there is a NaN,
    # because then the largest maximum is NaN, which equals nothing.
    num_best = (maxima == maxima.amax(-1, keepdim=True)).to(torch.int64).sum(-1)
    return or_else(_greedy_with_ties, torch.where(num_best == 1, tokens, UNSURE), logits)


def _greedy_with_ties(logits):
    """Search the first block with the largest maximum. The result is sure if there is no NaN."""
    blocks = split_blocks(logits, 64)
    maxima = blocks.amax(-1)
    best = maxima.argmax(-1)
    block = blocks.gather(1, best.reshape(-1, 1, 1).expand(-1, 1, blocks.shape[2])).squeeze(1)
    tokens = best * blocks.shape[2] + block.argmax(-1)
    tokens = torch.where((maxima == maxima).all(-1), tokens, UNSURE)
    return or_else(lambda logits: replace_nan(logits).argmax(-1), tokens, logits)
