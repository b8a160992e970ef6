"""`mlx::sample`: the next token of every row of logits.

The text below is the operator: eager execution runs it, lowering traces it. All of it is
float32 and all of it speaks of `drop = max(logits) - logits`, the distance of a token below
the most likely one, so that no temperature makes it overflow:

    weight(token) = exp(-drop / temperature)            the mass, but for its normalizer
    winner        = argmin(drop / temperature - gumbel) over the tokens that are kept

which is argmax(logits / temperature + gumbel), with gumbel = -log(-log(uniform)).

A row of 128k logits is never sorted where it can be helped. Every path first works on a few
candidates and gives UNSURE where its token may not be that of the whole row; only then (flat
logits, a large top_k, NaN) does a second path, plain and slow, run over everything. Both give
one token for one seed, for the noise does not depend on the path: where no filter is on, token
v of row b takes word [b, v] of `random_bits([B, V], seed)`; where one is, the i-th most likely
token (equal ones in the order of the vocabulary) takes word [b, i] of `_words_of_ranks`. So a
token on the edge of the nucleus, where two devices may round apart, changes only its own luck.
"""

from __future__ import annotations

import torch

from ..custom_ops import define

LOG2_E = 1.4426950408889634
LARGEST = 3.4028234663852886e38
BELOW_ONE = 1 - 2.0**-24

# Candidates where filters are on, and the height of the columns they are looked for in.
# A nucleus has more tokens than a usual top_k, and no bound known before.
TIERS = ((256, 32), (2048, 16))
TIERS_WITH_TOP_K = ((64, 64), (1024, 16))
FAR = 1 << 62
NOISE_PARTS = (256, 2048)  # the last not below the candidates of any tier
NOISE_KEY = 0x1E3779B97F4A7C15  # the golden ratio: far from the seeds that people count
UNSURE = -1
DRAW_COLUMNS = 128  # columns looked into where every token may win
SHORT = 8192  # a row this short is cheaper to sort than to search


def sample_reference(logits, temperature, top_p, seed=None, top_k=None, min_p=None):
    """The token of each row, `[B]` int64; the parameters are tensors of one element."""
    logits = logits.to(torch.float32)
    temperature, top_p, min_p = (_scalar(p, torch.float32) for p in (temperature, top_p, min_p))
    seed, top_k = (_scalar(p, torch.int64) for p in (seed, top_k))
    return _if(temperature > 0, _drawn, _greedy, logits, temperature, top_p, seed, top_k, min_p)


def _if(predicate, then, otherwise, *operands):
    """`torch.cond` over operands of which some may be None."""

    def branch(function):
        def run(*tensors):
            rest = iter(tensors)
            return (function(*[None if o is None else next(rest) for o in operands]),)

        return run

    given = tuple(o for o in operands if o is not None)
    return torch.ops.higher_order.cond(predicate, branch(then), branch(otherwise), given)[0]



def _scalar(x, dtype):
    if x is None:
        return None
    return (x.reshape(()) if x.dim() else x).to(dtype)


def _sure_or(otherwise, tokens, *operands):
    """`tokens` if they are sure in every row, else `otherwise(*operands)`.

    The test reads the tokens themselves: waiting for it, the host has them too.
    """
    return _if(
        (tokens >= 0).all(),
        lambda tokens, *_: tokens.clone(),
        lambda _, *rest: otherwise(*rest),
        tokens, *operands,
    )


# Greedy --------------------------------------------------------------------------------


def _greedy(logits, temperature, top_p, seed, top_k, min_p):
    """Exact argmax: the first row of the one column with the largest maximum."""
    columns = _columns(logits, 64)
    maxima = columns.amax(1)
    column = maxima.argmax(-1, keepdim=True)
    tokens = _pick(columns, column).argmax(-1) * columns.shape[2] + column.squeeze(1)
    # Several columns if the maximum is tied, none if there is a NaN.
    ways = (maxima == maxima.amax(-1, keepdim=True)).to(torch.int64).sum(-1)
    return _sure_or(_greedy_tied, torch.where(ways == 1, tokens, UNSURE), logits)


def _greedy_tied(logits):
    """Exact argmax: that of the first block with the largest maximum."""
    blocks = _blocks(logits, 64)
    maxima = blocks.amax(-1)
    block = maxima.argmax(-1)
    row = blocks.gather(1, block.reshape(-1, 1, 1).expand(-1, 1, blocks.shape[2])).squeeze(1)
    tokens = block * blocks.shape[2] + row.argmax(-1)
    tokens = torch.where((maxima == maxima).all(-1), tokens, UNSURE)  # a NaN in the row
    return _sure_or(lambda logits: _clean(logits).argmax(-1), tokens, logits)


def _blocks(x, size):
    """`[B, V]` as `[B, blocks, n]`, n about `size`."""
    vocabulary = x.shape[1]
    count = next((vocabulary // n for n in _near(size) if vocabulary % n == 0), None)
    if count is None:
        count = -(-vocabulary // size)
        x = torch.nn.functional.pad(x, (0, count * size - vocabulary), value=-torch.inf)
    return x.reshape(x.shape[0], count, -1)


def _columns(x, size):
    """`[B, V]` as `[B, n, columns]`, n about `size`: token `i * columns + j` is at `[i, j]`.

    Reducing over n is four times faster than over the last axis, and MLX vectorizes it.
    """
    vocabulary = x.shape[1]
    n = next((n for n in _near(size) if vocabulary % n == 0), size)
    if vocabulary % n:
        x = torch.nn.functional.pad(x, (0, -vocabulary % n), value=-torch.inf)
    return x.reshape(x.shape[0], n, -1)


def _near(size):
    return sorted(range(size // 2, 2 * size + 1), key=lambda n: abs(n - size))


def _clean(logits):
    """NaN never wins, and +inf is the largest number: there is a distance to it."""
    logits = torch.where(logits != logits, -torch.inf, logits)
    return torch.clamp(logits, max=LARGEST)


# Drawn ---------------------------------------------------------------------------------


def _drawn(logits, temperature, top_p, seed, top_k, min_p):
    # Within these bounds a distance over the temperature, and its reverse, are numbers.
    temperature = torch.clamp(temperature, min=1e-30, max=1e30)
    seed = _fresh_seed() if seed is None else seed
    filters = top_p < 1
    if top_k is not None:
        filters = filters | ((top_k > 0) & (top_k < logits.shape[1]))
    if min_p is not None:
        filters = filters | (min_p > 0)
    return _if(filters, _filtered, _unfiltered, logits, temperature, top_p, seed, top_k, min_p)


def _fresh_seed():
    high, low = torch.ops.mlx.random_bits([2]).to(torch.int64).unbind()
    return torch.bitwise_and(high, 0x7FFFFFFF) * (1 << 32) + low


def _unfiltered(logits, temperature, top_p, seed, top_k, min_p):
    batch, vocabulary = logits.shape
    words = torch.ops.mlx.random_bits([batch, vocabulary], seed).to(torch.float32)
    if vocabulary <= SHORT:
        return _draw_of_all(logits, temperature, words)
    operands = (logits, temperature, words)
    return _sure_or(_draw_of_all, _draw_of_columns(*operands), *operands)


def _draw_of_all(logits, temperature, words):
    logits = _clean(logits)
    return ((_top(logits) - logits) / temperature + _minus_gumbel(words)).argmin(-1)


def _draw_of_columns(logits, temperature, words):
    """The draw over the columns that promise most; UNSURE if another column may win.

    A column promises the cost that its largest logit would have with its largest noise.
    """
    logits, words = _columns(logits, 32), _columns(words, 32)
    maxima = logits.amax(1)
    top = maxima.amax(-1, keepdim=True)
    # 1e-4 is more than the logarithms of any device are away from monotone.
    promise = (top - maxima) / temperature + (_minus_gumbel(words.amax(1)) - 1e-4)
    order = torch.ops.mlx.argpartition(promise, DRAW_COLUMNS, -1)
    columns = order[:, :DRAW_COLUMNS]
    outside = promise.gather(1, order[:, DRAW_COLUMNS : DRAW_COLUMNS + 1])
    cost = (top - _pick(logits, columns)) / temperature + _minus_gumbel(_pick(words, columns))
    best = cost.amin(-1, keepdim=True)
    winner = _lowest(_token_of_columns(columns, logits), cost == best)
    sure = (best < outside) & (top.abs() < torch.inf)
    return torch.where(sure.squeeze(1), winner, UNSURE)


def _minus_gumbel(words):
    """log(-log(uniform)) of words as float32: MLX's chain. The last bound keeps 0 finite."""
    uniform = torch.clamp(words * 2.0**-32, max=BELOW_ONE)
    return torch.clamp(torch.log(-torch.log(uniform)), max=LARGEST)


# Filtered ------------------------------------------------------------------------------


def _filtered(logits, temperature, top_p, seed, top_k, min_p):
    operands = (logits, temperature, top_p, seed, top_k, min_p)
    if logits.shape[1] <= SHORT:
        return _filtered_all(*operands)
    reach = _if(top_p < 1, _reach, _reach_off, logits, temperature, top_p)
    tiers = TIERS if top_k is None else TIERS_WITH_TOP_K
    tiers = [t for t in tiers if 2 * t[0] * t[1] < logits.shape[1]]
    return _filtered_tier(tiers, reach, *operands)


def _reach(logits, temperature, top_p):
    """The mass that the nucleus must have, `[B, 1]`."""
    logits = _columns(logits, 64)
    mass = _weight(_top(logits.amax(1)).unsqueeze(1) - logits, temperature)
    return top_p * mass.sum(1).sum(-1, keepdim=True)


def _reach_off(logits, temperature, top_p):
    return torch.full_like(logits[:, :1], torch.inf)


def _filtered_tier(tiers, reach, *operands):
    """The draw over ever more candidates until they hold all tokens that are kept."""
    if not tiers:
        return _filtered_all(*operands)
    tokens = _filtered_candidates(*tiers[0], reach, *operands)
    return _sure_or(
        lambda *operands: _filtered_tier(tiers[1:], *operands), tokens, reach, *operands
    )


def _filtered_candidates(count, size, reach, logits, temperature, top_p, seed, top_k, min_p):
    """The draw over the `count` most likely tokens; UNSURE if they may not be all that are kept.

    Those tokens are in the `count` columns with the largest maxima, or tied with one that is.
    If the last of them is dropped, so is everything outside. A NaN anywhere among the
    distances makes the last of them NaN, and nothing is sure.
    """
    logits = _columns(logits, size)
    maxima = logits.amax(1)
    columns = _largest(maxima, count)
    picked = _pick(logits, columns)
    best = _largest(picked, count)
    token, order = torch.sort(_token_of_columns(columns, logits).gather(1, best), -1)
    drop = maxima.amax(-1, keepdim=True) - picked.gather(1, best.gather(1, order))
    drop, order = torch.sort(drop, dim=-1, stable=True)
    place, sure = _draw_of_ranks(drop, reach, temperature, seed, top_k, min_p)
    token = token.gather(1, order.gather(1, place))
    return torch.where(sure, token, UNSURE).squeeze(1)


def _filtered_all(logits, temperature, top_p, seed, top_k, min_p):
    logits = _clean(logits)
    drop = _top(logits) - logits
    mass = _weight(drop, temperature).sum(-1, keepdim=True)
    reach = torch.where(top_p < 1, top_p * mass, torch.inf)
    drop, token = torch.sort(drop, dim=-1, stable=True)
    place, _ = _draw_of_ranks(drop, reach, temperature, seed, top_k, min_p)
    return token.gather(1, place).squeeze(1)


def _draw_of_ranks(drop, reach, temperature, seed, top_k, min_p):
    """The place of the winner in the ascending `drop`, and whether its last one cannot win: it is
    dropped, or its logit is -inf, as of most tokens under a mask."""
    limit = _limit(drop, reach, temperature, top_k)
    steps = drop / temperature
    kept = drop <= limit
    if min_p is not None:
        kept = kept & (steps <= _most(min_p))
    words = _words_of_ranks(*drop.shape, seed)
    place = torch.where(kept, steps + _minus_gumbel(words), torch.inf).argmin(-1, keepdim=True)
    last = drop.shape[1] - 1
    sure = ~(kept & (drop < torch.inf))[:, last:] & (drop[:, last:] == drop[:, last:])
    return place, sure


def _words_of_ranks(batch, count, seed):
    """The noise of the `count` most likely tokens, `[B, count]`, as float32.

    The words come in parts, each with a key of its own, so that few tokens need few words.
    """
    parts, start = [], 0
    for part, end in enumerate((*NOISE_PARTS, max(count, NOISE_PARTS[-1] + 1))):
        if start < count:
            key = torch.bitwise_xor(seed, part * NOISE_KEY) if part else seed
            words = torch.ops.mlx.random_bits([batch, end - start], key).to(torch.float32)
            parts.append(words[:, : count - start])
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _limit(drop, reach, temperature, top_k):
    """The distance of the last token that top_p and top_k keep, `[B, 1]`; infinite if both
    are off or it is not in `drop`, which holds the smallest distances in ascending order.
    """
    mass = torch.cumsum(_weight(drop, temperature), -1)
    place = (mass < reach).to(torch.int64).sum(-1, keepdim=True)
    if top_k is not None:
        place = torch.minimum(place, torch.where(top_k > 0, top_k - 1, FAR))
    end = drop.shape[1] - 1
    found = drop.gather(1, torch.clamp(place, max=end))
    return torch.where(place <= end, found, torch.inf)


def _most(min_p):
    """-log(min_p), the most that drop / temperature may be. min_p above 1 counts as 1, or it
    would drop the most likely token too."""
    return torch.where(min_p > 0, -torch.log(torch.clamp(min_p, max=1)), torch.inf)


def _weight(drop, temperature):
    """exp(-drop / temperature). MLX's power is three times faster on CPU than its exp."""
    return torch.pow(2.0, drop * (-LOG2_E / temperature))


# Shared --------------------------------------------------------------------------------


def _top(logits):
    """Maximum of each row, finite even where the row is -inf throughout."""
    return torch.clamp(logits.amax(-1, keepdim=True), min=-LARGEST)


def _largest(x, count):
    """Places of the `count` largest of each row, in no particular order."""
    size = x.shape[1]
    return torch.ops.mlx.argpartition(x, size - count, -1)[:, size - count :]


def _pick(x, columns):
    """`[B, n, C]` at `columns` `[B, K]`: `[B, n * K]`."""
    batch, n, _ = x.shape
    return x.gather(2, columns.unsqueeze(1).expand(-1, n, -1)).reshape(batch, -1)


def _token_of_columns(columns, logits):
    """Tokens of what `_pick` gives."""
    batch, n, width = logits.shape
    start = torch.arange(0, n * width, width).reshape(1, n, 1)
    return (start + columns.unsqueeze(1)).reshape(batch, -1)


def _lowest(token, wins):
    return torch.where(wins, token, torch.iinfo(torch.int64).max).amin(-1)


# The operator --------------------------------------------------------------------------


def _check(logits, temperature, top_p, seed, top_k, min_p):
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"mlx::sample: logits are {logits.dtype} of shape {list(logits.shape)}, expected "
            "float32, float16 or bfloat16 of shape [B, V]"
        )
    if logits.shape[1] == 0:
        raise ValueError("mlx::sample: logits have an empty vocabulary, expected V >= 1")
    floating = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    for name, value in {**floating, "seed": seed, "top_k": top_k}.items():
        if value is None:
            continue
        expected = "a floating" if name in floating else "an integer"
        if name == "seed":
            expected, right = "an int64", value.dtype == torch.int64
        else:
            right = value.dtype.is_floating_point == (name in floating)
        if value.numel() != 1 or not right or value.dtype == torch.bool:
            raise ValueError(
                f"mlx::sample: {name} is {value.dtype} of shape {list(value.shape)}, "
                f"expected {expected} tensor of one element"
            )


def _eager(logits, temperature, top_p, seed=None, top_k=None, min_p=None):
    _check(logits, temperature, top_p, seed, top_k, min_p)
    # A token has no gradient, and `cond` would trace one for logits that ask for it.
    with torch.no_grad():
        return sample_reference(logits, temperature, top_p, seed, top_k, min_p)


def _fake(logits, temperature, top_p, seed=None, top_k=None, min_p=None):
    _check(logits, temperature, top_p, seed, top_k, min_p)
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


sample = define(
    "sample(Tensor logits, Tensor temperature, Tensor top_p, Tensor? seed=None, "
    "Tensor? top_k=None, Tensor? min_p=None) -> Tensor",
    _eager,
    _fake,
)

COMPOSITES = {sample: sample_reference}
