"""Draws from all tokens: two versions."""

from __future__ import annotations

import torch

from .branches import SHORT_VOCABULARY, UNSURE, or_else
from .logits import lowest_id, pick, replace_nan_and_inf, row_max, split_columns, token_ids
from .noise import minus_gumbel

DRAW_COLUMNS = 128  # columns that the fast version looks at


def unfiltered(logits, temperature, top_p, seed, top_k, min_p):
    batch, vocabulary = logits.shape
    words = torch.ops.mlx.random_bits([batch, vocabulary], seed).to(torch.float32)
    if vocabulary <= SHORT_VOCABULARY:
        return _unfiltered_all(logits, temperature, words)
    operands = (logits, temperature, words)
    return or_else(_unfiltered_all, _unfiltered_columns(*operands), *operands)


def _unfiltered_all(logits, temperature, words):
    logits = replace_nan_and_inf(logits)
    return ((row_max(logits) - logits) / temperature + minus_gumbel(words)).argmin(-1)


def _unfiltered_columns(logits, temperature, words):
    """Search the most promising columns. The result is UNSURE if a token of another column may win.

    The cost of a token is `drop / temperature - gumbel`, and the token with the smallest cost wins. The cost that the
    largest logit of a column would have with the largest noise of the column is a lower bound for all costs in the
    column. The most promising columns are those with the smallest bounds.
    """
    logits, words = split_columns(logits, 32), split_columns(words, 32, padding=0.0)
    maxima = logits.amax(1)
    top = maxima.amax(-1, keepdim=True)
    # 1e-4 covers the rounding of the logarithm on every device.
    bound = (top - maxima) / temperature + (minus_gumbel(words.amax(1)) - 1e-4)
    order = torch.ops.mlx.argpartition(bound, DRAW_COLUMNS, -1)
    columns = order[:, :DRAW_COLUMNS]
    bound_outside = bound.gather(1, order[:, DRAW_COLUMNS : DRAW_COLUMNS + 1])
    cost = (top - pick(logits, columns)) / temperature + minus_gumbel(pick(words, columns))
    best = cost.amin(-1, keepdim=True)
    winner = lowest_id(token_ids(columns, logits), cost == best)
    sure = (best < bound_outside) & (top.abs() < torch.inf)
    return torch.where(sure.squeeze(1), winner, UNSURE)
