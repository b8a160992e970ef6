"""`mlx::sample`: draws the next token of each sequence from its logits.

The functions of this file and of `sampling/` are the operator: eager execution runs them, and lowering traces them. All
arithmetic is float32. The functions work with `drop = max(logits) - logits`, the distance of a token's logit from the
largest logit:

    weight(token) = exp(-drop / temperature)               the token's probability, not normalized
    result        = argmin(drop / temperature - gumbel)    over the tokens that the filters keep

where gumbel = -log(-log(uniform)). The result equals argmax(logits / temperature + gumbel), the Gumbel-max trick, which
draws from softmax(logits / temperature) among the kept tokens. `drop` is never negative, so that the exponential cannot
overflow at any temperature.

Fast paths and UNSURE. A vocabulary can have 128,000 tokens and more. It is slow to look at all of them, and even slower
to sort them. Each way to choose a token therefore has several versions, the fastest first. A fast version arranges the
logits of a sequence in a matrix and searches only some of the matrix's columns, or some of its blocks. With C columns,
column j holds the tokens j, j + C, j + 2C and so on. A block holds consecutive tokens.

    greedy             the best column, then the best block, then all tokens             `sampling/greedy.py`
    without filters    the most promising columns, then all tokens                       `sampling/unfiltered.py`
    with filters       a few candidates, then more, then all tokens in sorted order      `sampling/filtered.py`

A fast version takes the maximum of each column and then searches the columns with the largest maxima. It returns the
token if it can prove that the other columns cannot change the result, and UNSURE otherwise. If the result of any
sequence is UNSURE, `or_else` runs the next version for the whole batch, inside a `torch.cond`. The last version looks
at all tokens and never returns UNSURE. The logits of a language model rarely need a second version. Flat logits, ties,
NaN and a large top_k need one.

All versions give the same token for a seed, because noise belongs to a token and not to a version. `sampling/noise.py`
computes it:

    without filters    token v of sequence b uses the random 32-bit word [b, v] of `random_bits([B, V], seed)`
    with filters       the i-th most likely token uses the word [b, i] of `words_by_rank`; ties are ranked by token id

Because the noise with filters belongs to the rank, a version computes random words only for its candidates. And if
rounding on another device moves a token across the boundary of the nucleus, the noise of the other tokens stays the
same.
"""

from __future__ import annotations

import torch

from ..custom_ops.library import define
from .checks import check_logits, describe, fits_rows, is_per_row
from .sampling.branches import cond
from .sampling.filtered import filtered
from .sampling.greedy import greedy
from .sampling.noise import random_seed
from .sampling.unfiltered import unfiltered


def sample_definition(logits, temperature, top_p, seed=None, top_k=None, min_p=None):
    """Return the token of each sequence, int64 `[B]`.

    Each parameter is a tensor of one element, or of shape `[B]` with a value for each sequence. The parameters with a
    default may be None. If a parameter has shape `[B]`, each sequence draws what it draws alone, in a batch of one.
    """
    logits = logits.to(torch.float32)
    temperature, top_p, min_p = (_number(p, torch.float32) for p in (temperature, top_p, min_p))
    seed, top_k = (_number(p, torch.int64) for p in (seed, top_k))
    parameters = (temperature, top_p, seed, top_k, min_p)
    if not any(map(is_per_row, parameters)):
        return _sample(logits, *parameters)
    if not is_per_row(temperature):
        return cond(temperature > 0, _sample_rows, greedy, logits, *parameters)
    return cond((temperature > 0).any(), _sample_rows, greedy, logits, *parameters)


def _sample(logits, temperature, top_p, seed, top_k, min_p):
    return cond(temperature > 0, _draw, greedy, logits, temperature, top_p, seed, top_k, min_p)


def _sample_rows(logits, *parameters):
    """Draw one sequence after the other, so that each gets the same token as in a batch of one.

    `greedy` needs no such loop, because its result is exact.
    """
    rows = [logits, *(p for p in parameters if is_per_row(p))]
    shared = [p for p in parameters if p is not None and not is_per_row(p)]

    def step(done, row, *given):
        per_row, for_all = iter(given[: len(rows) - 1]), iter(given[len(rows) - 1 :])
        values = [p if p is None else next(per_row if is_per_row(p) else for_all) for p in parameters]
        return done + 1, _sample(row.unsqueeze(0), *values).squeeze(0)

    count = torch.zeros((), dtype=torch.int64)
    return torch.ops.higher_order.scan(step, [count], rows, tuple(shared))[1]


def _number(x, dtype):
    """Return a parameter as a tensor of `dtype`, 0-d or `[B]`. None stays None."""
    if x is None:
        return None
    return (x if is_per_row(x) or not x.dim() else x.reshape(())).to(dtype)


def _draw(logits, temperature, top_p, seed, top_k, min_p):
    # Within these bounds, `drop / temperature` and `LOG2_E / temperature` are finite.
    temperature = torch.clamp(temperature, min=1e-30, max=1e30)
    seed = random_seed() if seed is None else seed
    has_filter = top_p < 1
    if top_k is not None:
        has_filter = has_filter | ((top_k > 0) & (top_k < logits.shape[1]))
    if min_p is not None:
        has_filter = has_filter | (min_p > 0)
    return cond(has_filter, filtered, unfiltered, logits, temperature, top_p, seed, top_k, min_p)


def _check(logits, temperature, top_p, seed, top_k, min_p):
    check_logits("sample", logits)
    floating = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    for name, value in {**floating, "seed": seed, "top_k": top_k}.items():
        if value is None:
            continue
        expected = "a floating-point" if name in floating else "an integer"
        if name == "seed":
            expected, has_dtype = "an int64", value.dtype == torch.int64
        else:
            has_dtype = value.dtype.is_floating_point == (name in floating)
        if not (fits_rows(value, logits.shape[0]) and has_dtype) or value.dtype == torch.bool:
            raise ValueError(
                f"mlx::sample: {name}: got {describe(value)}, expected {expected} tensor of one element or of shape "
                f"[{logits.shape[0]}]"
            )


def _eager(logits, temperature, top_p, seed=None, top_k=None, min_p=None):
    _check(logits, temperature, top_p, seed, top_k, min_p)
    # Tokens have no gradient. Without `no_grad`, `cond` would trace a backward graph for logits that require gradients.
    with torch.no_grad():
        return sample_definition(logits, temperature, top_p, seed, top_k, min_p)


def _fake(logits, temperature, top_p, seed=None, top_k=None, min_p=None):
    _check(logits, temperature, top_p, seed, top_k, min_p)
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


sample = define(
    "sample(Tensor logits, Tensor temperature, Tensor top_p, Tensor? seed=None, "
    "Tensor? top_k=None, Tensor? min_p=None) -> Tensor",
    _eager,
    _fake,
)

COMPOSITES = {sample: sample_definition}
