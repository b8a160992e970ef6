"""Draws from the tokens that top_p, top_k and min_p keep: a version for each tier of candidates, and one for all."""

from __future__ import annotations

import torch

from .branches import SHORT_VOCABULARY, UNSURE, cond, or_else
from .logits import indices_of_largest, pick, replace_nan_and_inf, row_max, split_columns, token_ids
from .noise import minus_gumbel, words_by_rank

LOG2_E = 1.4426950408889634
# The fast versions with filters: (number of candidates, height of the columns in which they are searched). There are
# more candidates without top_k, because the size of the nucleus is unknown and often larger than a usual top_k.
TIERS = ((256, 32), (2048, 16))
TIERS_WITH_TOP_K = ((64, 64), (1024, 16))
BEYOND_ALL_RANKS = (1 << 31) - 1


def filtered(logits, temperature, top_p, seed, top_k, min_p):
    operands = (logits, temperature, top_p, seed, top_k, min_p)
    if logits.shape[1] <= SHORT_VOCABULARY:
        return _filtered_all(*operands)
    nucleus_weight = cond(top_p < 1, _nucleus_weight, _infinite_weight, logits, temperature, top_p)
    tiers = TIERS if top_k is None else TIERS_WITH_TOP_K
    # A tier looks at count * height tokens. It is not worth its time if these are half of the vocabulary or more.
    tiers = [(count, height) for count, height in tiers if 2 * count * height < logits.shape[1]]
    return _filtered_tiers(tiers, nucleus_weight, *operands)


def _nucleus_weight(logits, temperature, top_p):
    """Return the total weight that the tokens of the nucleus must reach, `[B, 1]`: `top_p` times the weight of all."""
    logits = split_columns(logits, 64)
    weight = _weight(row_max(logits.amax(1)).unsqueeze(1) - logits, temperature)
    return top_p * weight.sum(1).sum(-1, keepdim=True)


def _infinite_weight(logits, temperature, top_p):
    return torch.full_like(logits[:, :1], torch.inf)


def _filtered_tiers(tiers, nucleus_weight, *operands):
    """Try the tiers of candidates one after the other, and finally all tokens. Returns the tokens."""
    if not tiers:
        return _filtered_all(*operands)
    tokens = _filtered_candidates(*tiers[0], nucleus_weight, *operands)
    return or_else(lambda *operands: _filtered_tiers(tiers[1:], *operands), tokens, nucleus_weight, *operands)


def _filtered_candidates(count, height, nucleus_weight, logits, temperature, top_p, seed, top_k, min_p):
    """Draw from the `count` most likely tokens, the candidates. The result is UNSURE if the filters may keep another.

    Each candidate is in one of the `count` columns with the largest maxima, or is tied with a token there. If the
    filters remove the least likely candidate, they remove every token that is not a candidate. If a logit is NaN, the
    largest maximum and every `drop` are NaN too, and the result is UNSURE.
    """
    logits = split_columns(logits, height)
    maxima = logits.amax(1)
    columns = indices_of_largest(maxima, count)
    picked = pick(logits, columns)
    best = indices_of_largest(picked, count)
    # The candidates are sorted by token id first, so that the stable sort by drop below ranks ties by token id.
    token, order = torch.sort(token_ids(columns, logits).gather(1, best), -1)
    drop = maxima.amax(-1, keepdim=True) - picked.gather(1, best.gather(1, order))
    drop, order = torch.sort(drop, dim=-1, stable=True)
    rank, sure = _draw_rank(drop, nucleus_weight, temperature, seed, top_k, min_p)
    token = token.gather(1, order.gather(1, rank))
    return torch.where(sure, token, UNSURE).squeeze(1)


def _filtered_all(logits, temperature, top_p, seed, top_k, min_p):
    logits = replace_nan_and_inf(logits)
    drop = row_max(logits) - logits
    weight = _weight(drop, temperature).sum(-1, keepdim=True)
    nucleus_weight = torch.where(top_p < 1, top_p * weight, torch.inf)
    drop, token = torch.sort(drop, dim=-1, stable=True)
    rank, _ = _draw_rank(drop, nucleus_weight, temperature, seed, top_k, min_p)
    return token.gather(1, rank).squeeze(1)


def _draw_rank(drop, nucleus_weight, temperature, seed, top_k, min_p):
    """Return the rank that the draw chooses, `[B, 1]`, and whether this rank is sure, `[B, 1]`.

    `drop` `[B, N]` is ascending and belongs to the N most likely tokens. The rank is sure if no token beyond these can
    win: the filters remove the last of the N tokens, or its logit is -inf, as under a mask. The rank is not sure if the
    last `drop` is NaN.
    """
    limit = _largest_kept_drop(drop, nucleus_weight, temperature, top_k)
    scaled_drop = drop / temperature
    kept = drop <= limit
    if min_p is not None:
        kept = kept & (scaled_drop <= _largest_kept_scaled_drop(min_p))
    words = words_by_rank(*drop.shape, seed)
    rank = torch.where(kept, scaled_drop + minus_gumbel(words), torch.inf).argmin(-1, keepdim=True)
    last = drop.shape[1] - 1
    sure = ~(kept & (drop < torch.inf))[:, last:] & (drop[:, last:] == drop[:, last:])
    return rank, sure


def _largest_kept_drop(drop, nucleus_weight, temperature, top_k):
    """Return the drop of the least likely token that top_p and top_k keep, `[B, 1]`.

    The result is infinite if that token is not among the tokens of `drop`.
    """
    weight = torch.cumsum(_weight(drop, temperature), -1)
    rank = (weight < nucleus_weight).to(torch.int64).sum(-1, keepdim=True)
    if top_k is not None:
        rank = torch.minimum(rank, torch.where(top_k > 0, top_k - 1, BEYOND_ALL_RANKS))
    last = drop.shape[1] - 1
    limit = drop.gather(1, torch.clamp(rank, max=last))
    return torch.where(rank <= last, limit, torch.inf)


def _largest_kept_scaled_drop(min_p):
    """Return -log(min_p), the largest `drop / temperature` that min_p keeps.

    A min_p above 1 would keep no token. Such a min_p counts as 1.
    """
    return torch.where(min_p > 0, -torch.log(torch.clamp(min_p, max=1)), torch.inf)


def _weight(drop, temperature):
    """Return exp(-drop / temperature), computed as a power of 2: on a CPU, MLX's power is faster than MLX's exp."""
    return torch.pow(2.0, drop * (-LOG2_E / temperature))
