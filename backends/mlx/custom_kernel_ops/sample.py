"""`mlx::sample`: draws the next token of each sequence from its logits.

The functions below are the operator: eager execution runs them, and lowering traces them. All arithmetic is float32.
The functions work with `drop = max(logits) - logits`, the distance of a token's logit from the largest logit:

    weight(token) = exp(-drop / temperature)               the token's probability, not normalized
    result        = argmin(drop / temperature - gumbel)    over the tokens that the filters keep

where gumbel = -log(-log(uniform)). The result equals argmax(logits / temperature + gumbel), the Gumbel-max trick, which
draws from softmax(logits / temperature) among the kept tokens. `drop` is never negative, so that the exponential cannot
overflow at any temperature.

Fast paths and UNSURE. A vocabulary can have 128,000 tokens and more. It is slow to look at all of them, and even slower
to sort them. Each way to choose a token therefore has several versions, the fastest first. A fast version arranges the
logits of a sequence in a matrix and searches only some of the matrix's columns, or some of its blocks. With C columns,
column j holds the tokens j, j + C, j + 2C and so on. A block holds consecutive tokens.

    greedy             the best column, then the best block, then all tokens
    without filters    the most promising columns, then all tokens
    with filters       a few candidates, then more (`TIERS`), then all tokens in sorted order

A fast version takes the maximum of each column and then searches the columns with the largest maxima. It returns the
token if it can prove that the other columns cannot change the result, and UNSURE otherwise. If the result of any
sequence is UNSURE, `_or_else` runs the next version for the whole batch, inside a `torch.cond`. The last version looks
at all tokens and never returns UNSURE. The logits of a language model rarely need a second version. Flat logits, ties,
NaN and a large top_k need one.

All versions give the same token for a seed, because noise belongs to a token and not to a version:

    without filters    token v of sequence b uses the random 32-bit word [b, v] of `random_bits([B, V], seed)`
    with filters       the i-th most likely token uses the word [b, i] of `_words_by_rank`; ties are ranked by token id

Because the noise with filters belongs to the rank, a version computes random words only for its candidates. And if
rounding on another device moves a token across the boundary of the nucleus, the noise of the other tokens stays the
same.
"""

from __future__ import annotations

import torch

from ..custom_ops.library import define
from .checks import check_logits, describe, fits_rows, is_per_row

LOG2_E = 1.4426950408889634
LARGEST_FLOAT = 3.4028234663852886e38  # float32
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1

UNSURE = -1  # in place of a token
SHORT_VOCABULARY = 8192  # up to this size, it is faster to look at all tokens than to search for candidates
# The fast versions with filters: (number of candidates, height of the columns in which they are searched). There are
# more candidates without top_k, because the size of the nucleus is unknown and often larger than a usual top_k.
TIERS = ((256, 32), (2048, 16))
TIERS_WITH_TOP_K = ((64, 64), (1024, 16))
DRAW_COLUMNS = 128  # columns that the fast version without filters looks at
# The ranks at which the second and the third part of the noise begin. Each part has a seed of its own. No tier has more
# than 2048 candidates, so only the version for all tokens computes the third part.
NOISE_PARTS = (256, 2048)
# Makes the seeds of the parts differ. It is derived from the golden ratio, far from the seeds that people choose.
NOISE_KEY = 0x1E3779B97F4A7C15
BEYOND_ALL_RANKS = 1 << 62


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
        return _cond(temperature > 0, _sample_rows, _greedy, logits, *parameters)
    return _cond((temperature > 0).any(), _sample_rows, _greedy, logits, *parameters)


def _sample(logits, temperature, top_p, seed, top_k, min_p):
    return _cond(temperature > 0, _draw, _greedy, logits, temperature, top_p, seed, top_k, min_p)


def _sample_rows(logits, *parameters):
    """Draw one sequence after the other, so that each gets the same token as in a batch of one.

    `_greedy` needs no such loop, because its result is exact.
    """
    rows = [logits, *(p for p in parameters if is_per_row(p))]
    shared = [p for p in parameters if p is not None and not is_per_row(p)]

    def step(done, row, *given):
        per_row, for_all = iter(given[: len(rows) - 1]), iter(given[len(rows) - 1 :])
        values = [p if p is None else next(per_row if is_per_row(p) else for_all) for p in parameters]
        return done + 1, _sample(row.unsqueeze(0), *values).squeeze(0)

    count = torch.zeros((), dtype=torch.int64)
    return torch.ops.higher_order.scan(step, [count], rows, tuple(shared))[1]


def _cond(predicate, true_fn, false_fn, *operands):
    """Call `torch.cond` with operands that may be None, and return the one tensor that the branch returns."""

    def branch(function):
        def run(*tensors):
            rest = iter(tensors)
            return (function(*[None if o is None else next(rest) for o in operands]),)

        return run

    given = tuple(o for o in operands if o is not None)
    return torch.ops.higher_order.cond(predicate, branch(true_fn), branch(false_fn), given)[0]


def _number(x, dtype):
    """Return a parameter as a tensor of `dtype`, 0-d or `[B]`. None stays None."""
    if x is None:
        return None
    return (x if is_per_row(x) or not x.dim() else x.reshape(())).to(dtype)


def _or_else(next_version, tokens, *operands):
    """Return `tokens` if none of them is UNSURE, else `next_version(*operands)`.

    The host waits for the predicate before it chooses a branch. The predicate depends on `tokens`, so the tokens are
    computed by then: reading them later takes no second wait.
    """
    return _cond(
        (tokens >= 0).all(),
        lambda tokens, *_: tokens.clone(),
        lambda _, *rest: next_version(*rest),
        tokens, *operands,
    )


# Greedy: three versions of the exact argmax -----------------------------------------------


def _greedy(logits, temperature, top_p, seed, top_k, min_p):
    """Search the column with the largest maximum. The result is sure if exactly one column has this maximum."""
    columns = split_columns(logits, 64)
    maxima = columns.amax(1)
    column = maxima.argmax(-1, keepdim=True)
    tokens = _pick(columns, column).argmax(-1) * columns.shape[2] + column.squeeze(1)
    # The number of columns with the largest maximum: more than 1 if columns are tied. It is 0 if there is a NaN,
    # because then the largest maximum is NaN, which equals nothing.
    num_best = (maxima == maxima.amax(-1, keepdim=True)).to(torch.int64).sum(-1)
    return _or_else(_greedy_with_ties, torch.where(num_best == 1, tokens, UNSURE), logits)


def _greedy_with_ties(logits):
    """Search the first block with the largest maximum. The result is sure if there is no NaN."""
    blocks = split_blocks(logits, 64)
    maxima = blocks.amax(-1)
    best = maxima.argmax(-1)
    block = blocks.gather(1, best.reshape(-1, 1, 1).expand(-1, 1, blocks.shape[2])).squeeze(1)
    tokens = best * blocks.shape[2] + block.argmax(-1)
    tokens = torch.where((maxima == maxima).all(-1), tokens, UNSURE)
    return _or_else(lambda logits: _replace_nan(logits).argmax(-1), tokens, logits)


def split_blocks(x, size):
    """Return `[B, V]` as `[B, blocks, n]` with n near `size`, padded with -inf. A block holds consecutive tokens."""
    vocabulary = x.shape[1]
    count = next((vocabulary // n for n in _near(size) if vocabulary % n == 0), None)
    if count is None:
        count = -(-vocabulary // size)
        x = torch.nn.functional.pad(x, (0, count * size - vocabulary), value=-torch.inf)
    return x.reshape(x.shape[0], count, x.shape[1] // count)


def split_columns(x, height, padding=-torch.inf):
    """Return `[B, V]` as `[B, n, C]`: C columns of n tokens, with n near `height`, padded with `padding`.

    Token `i * C + j` is at `[i, j]`.

    MLX vectorizes a reduction over n, which is four times faster than one over the last dimension.
    """
    vocabulary = x.shape[1]
    n = next((n for n in _near(height) if vocabulary % n == 0), height)
    if vocabulary % n:
        x = torch.nn.functional.pad(x, (0, -vocabulary % n), value=padding)
    return x.reshape(x.shape[0], n, x.shape[1] // n)


def _near(size):
    """Return the integers from size / 2 to 2 * size, those nearest to `size` first."""
    return sorted(range(size // 2, 2 * size + 1), key=lambda n: abs(n - size))


def _replace_nan(logits):
    """Replace NaN by -inf, which never wins."""
    return torch.where(logits != logits, -torch.inf, logits)


def replace_nan_and_inf(logits):
    """Replace NaN by -inf, and +inf by the largest float32.

    With +inf, differences from the largest logit would be NaN.
    """
    return torch.clamp(_replace_nan(logits), max=LARGEST_FLOAT)


# Draws without filters: two versions ------------------------------------------------------


def _draw(logits, temperature, top_p, seed, top_k, min_p):
    # Within these bounds, `drop / temperature` and `LOG2_E / temperature` are finite.
    temperature = torch.clamp(temperature, min=1e-30, max=1e30)
    seed = _random_seed() if seed is None else seed
    has_filter = top_p < 1
    if top_k is not None:
        has_filter = has_filter | ((top_k > 0) & (top_k < logits.shape[1]))
    if min_p is not None:
        has_filter = has_filter | (min_p > 0)
    return _cond(has_filter, _filtered, _unfiltered, logits, temperature, top_p, seed, top_k, min_p)


def _random_seed():
    high, low = torch.ops.mlx.random_bits([2]).to(torch.int64).unbind()
    return torch.bitwise_and(high, 0x7FFFFFFF) * (1 << 32) + low


def _unfiltered(logits, temperature, top_p, seed, top_k, min_p):
    batch, vocabulary = logits.shape
    words = torch.ops.mlx.random_bits([batch, vocabulary], seed).to(torch.float32)
    if vocabulary <= SHORT_VOCABULARY:
        return _unfiltered_all(logits, temperature, words)
    operands = (logits, temperature, words)
    return _or_else(_unfiltered_all, _unfiltered_columns(*operands), *operands)


def _unfiltered_all(logits, temperature, words):
    logits = replace_nan_and_inf(logits)
    return ((row_max(logits) - logits) / temperature + _minus_gumbel(words)).argmin(-1)


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
    bound = (top - maxima) / temperature + (_minus_gumbel(words.amax(1)) - 1e-4)
    order = torch.ops.mlx.argpartition(bound, DRAW_COLUMNS, -1)
    columns = order[:, :DRAW_COLUMNS]
    bound_outside = bound.gather(1, order[:, DRAW_COLUMNS : DRAW_COLUMNS + 1])
    cost = (top - _pick(logits, columns)) / temperature + _minus_gumbel(_pick(words, columns))
    best = cost.amin(-1, keepdim=True)
    winner = _lowest_id(_token_ids(columns, logits), cost == best)
    sure = (best < bound_outside) & (top.abs() < torch.inf)
    return torch.where(sure.squeeze(1), winner, UNSURE)


def _minus_gumbel(words):
    """Return -gumbel = log(-log(uniform)) for random 32-bit words, which are given as float32.

    MLX computes the same uniform numbers from random words. The result is finite even for the word 0.
    """
    uniform = torch.clamp(words * 2.0**-32, max=BELOW_ONE)
    return torch.clamp(torch.log(-torch.log(uniform)), max=LARGEST_FLOAT)


# Draws with filters: one version per tier, and one for all tokens --------------------------


def _filtered(logits, temperature, top_p, seed, top_k, min_p):
    operands = (logits, temperature, top_p, seed, top_k, min_p)
    if logits.shape[1] <= SHORT_VOCABULARY:
        return _filtered_all(*operands)
    nucleus_weight = _cond(top_p < 1, _nucleus_weight, _infinite_weight, logits, temperature, top_p)
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
    return _or_else(
        lambda *operands: _filtered_tiers(tiers[1:], *operands), tokens, nucleus_weight, *operands
    )


def _filtered_candidates(count, height, nucleus_weight, logits, temperature, top_p, seed, top_k, min_p):
    """Draw from the `count` most likely tokens, the candidates. The result is UNSURE if the filters may keep another.

    Each candidate is in one of the `count` columns with the largest maxima, or is tied with a token there. If the
    filters remove the least likely candidate, they remove every token that is not a candidate. If a logit is NaN, the
    largest maximum and every `drop` are NaN too, and the result is UNSURE.
    """
    logits = split_columns(logits, height)
    maxima = logits.amax(1)
    columns = _indices_of_largest(maxima, count)
    picked = _pick(logits, columns)
    best = _indices_of_largest(picked, count)
    # The candidates are sorted by token id first, so that the stable sort by drop below ranks ties by token id.
    token, order = torch.sort(_token_ids(columns, logits).gather(1, best), -1)
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
    words = _words_by_rank(*drop.shape, seed)
    rank = torch.where(kept, scaled_drop + _minus_gumbel(words), torch.inf).argmin(-1, keepdim=True)
    last = drop.shape[1] - 1
    sure = ~(kept & (drop < torch.inf))[:, last:] & (drop[:, last:] == drop[:, last:])
    return rank, sure


def _words_by_rank(batch, count, seed):
    """Return the random words of the `count` most likely tokens, `[B, count]` in float32.

    The words come in parts, each of which has a seed of its own. A version with few candidates computes only the first
    parts, which have the same words in every version.
    """
    parts, start = [], 0
    for part, end in enumerate((*NOISE_PARTS, max(count, NOISE_PARTS[-1] + 1))):
        if start < count:
            key = torch.bitwise_xor(seed, part * NOISE_KEY) if part else seed
            words = torch.ops.mlx.random_bits([batch, end - start], key).to(torch.float32)
            parts.append(words[:, : count - start])
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


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


# Shared -----------------------------------------------------------------------------------


def row_max(logits):
    """Return the largest logit of each sequence, `[B, 1]`. It is finite even if all logits are -inf."""
    return torch.clamp(logits.amax(-1, keepdim=True), min=-LARGEST_FLOAT)


def _indices_of_largest(x, count):
    """Return the indices of the `count` largest elements of each sequence, in no particular order."""
    size = x.shape[1]
    return torch.ops.mlx.argpartition(x, size - count, -1)[:, size - count :]


def _pick(x, columns):
    """Return the columns of `x` `[B, n, C]` with the indices `columns` `[B, K]`, flattened to `[B, n * K]`."""
    return x.gather(2, columns.unsqueeze(1).expand(-1, x.shape[1], -1)).flatten(1)


def _token_ids(columns, logits):
    """Return the token ids of the elements that `_pick(logits, columns)` returns."""
    _, n, width = logits.shape
    start = torch.arange(0, n * width, width).reshape(1, n, 1)
    return (start + columns.unsqueeze(1)).flatten(1)


def _lowest_id(token, is_best):
    """Return, for each sequence, the lowest of the token ids whose `is_best` is True."""
    return torch.where(is_best, token, torch.iinfo(torch.int64).max).amin(-1)


# The operator -----------------------------------------------------------------------------


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
