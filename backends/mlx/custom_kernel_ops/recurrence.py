"""Recurrences over the tokens of a sequence, for layers that keep a state in place of keys and values.

    mlx::gated_delta_rule          state = exp(decay) * state;  state += key ⊗ beta * (value - key @ state)
    mlx::gated_linear_attention    state = exp(decay) * state + key ⊗ value
    mlx::selective_scan            state = exp(step * rates) * state + step * input * key, one state for each channel
    mlx::diagonal_recurrence       state = decay * state + input

The token rules below define the operators: eager execution calls them in a loop over the tokens, and
`ops/recurrence.py` lowers that loop to a `ScanNode` whose body is the traced rule. All arithmetic is float32. Each
operator takes the state before its tokens and returns the state after them, so that a sequence may be split into calls
anywhere.

The first two have a second form for many tokens: a block rule takes `size` tokens at once, with matrix products. It
reads and writes the state once for each block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..custom_ops.library import define

BLOCK = 64  # tokens of a block
# Tokens of a block if each of the K channels of a key has a decay of its own. The block rule then needs tensors K times
# as large, so its blocks are smaller.
CHANNEL_BLOCK = 16
MIN_TOKENS_FOR_BLOCKS = 8  # fewer tokens are processed one by one


@dataclass(frozen=True)
class Rule:
    """How a recurrence advances.

    - `token(state, *tensors) -> (state, output)`: advances by one token. The tensors have no axis for the tokens.
    - `axis`: the axis of the tokens in the tensors of the operator.
    - `block(state, *tensors) -> (state, outputs)`: advances by `size` tokens. The tensors have an axis for these
      tokens. Tokens of zeros do not change the state. None if there is no rule for blocks.
    - `fixed`: the number of tensors, at the end of `tensors`, that are the same for all tokens.
    """

    token: Callable
    axis: int
    block: Callable | None = None
    size: int = 0
    fixed: int = 0


def _recur(step, axis, state, tensors, fixed=()):
    """Call `state, y = step(state, *x, *fixed)` with the slice `x` of the tensors at each index of `axis`.

    Returns the stacked `y` and the final state.
    """
    out = []
    for index in range(tensors[0].shape[axis]):
        state, y = step(state, *(x.select(axis, index) for x in tensors), *fixed)
        out.append(y)
    return torch.stack(out, axis), state


def _blocks(x, size):
    """Return `x` [B, H, S, ...] as [B, H, blocks, size, ...]. The last block is filled up with zeros."""
    missing = -x.shape[2] % size
    padded = torch.cat([x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])], 2)
    return padded.unflatten(2, (-1, size))


def _run(rule, tensors, state):
    """Return the outputs and the state after the tokens of `tensors`."""
    state, *tensors = (x.to(torch.float32) for x in (state, *tensors))
    tensors, fixed = tensors[: len(tensors) - rule.fixed], tensors[len(tensors) - rule.fixed :]
    length = tensors[0].shape[rule.axis]
    if rule.block is None or length < MIN_TOKENS_FOR_BLOCKS:
        return _recur(rule.token, rule.axis, state, tensors, fixed)
    out, state = _recur(rule.block, rule.axis, state, [_blocks(x, rule.size) for x in tensors], fixed)
    return out.flatten(2, 3)[:, :, :length].contiguous(), state


def _per_head(x, heads):
    """Return `x` [B, G, ...] as [B, heads, ...]: repeats each of the G keys or queries for the heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


# Gated linear attention -------------------------------------------------------------------


def _linear_token(state, q, k, v, decay):
    heads = v.shape[1]
    q, k = (_per_head(x, heads) for x in (q, k))
    state = state * decay.exp()[..., None, None] + k[..., None] * v[..., None, :]
    return state, (q[:, :, None] @ state)[:, :, 0]


def _linear_block(state, q, k, v, decay):
    heads = v.shape[1]
    since_start, pairwise, until_end = _decays(decay)
    scores = _per_head(q @ k.mT, heads) * pairwise
    q, k = (_per_head(x, heads) for x in (q, k))
    out = (q * since_start[..., None]) @ state + scores @ v
    state = state * since_start[..., -1:, None] + (k * until_end[..., None]).mT @ v
    return state, out


def _decays(decay):
    """Return the decays from the start of a block to each token, between two tokens, and from each token to the end.

    Their shapes are [..., C], [..., C, C] and [..., C].
    """
    total = decay.cumsum(-1)
    return total.exp(), _exp_of_lower_triangle(total[..., None] - total[..., None, :]), (total[..., -1:] - total).exp()


def _exp_of_lower_triangle(exponents):
    """Return `exp(exponents)` of the pairs [..., C, C] in which the second token is not after the first, else 0."""
    size = exponents.shape[-1]
    is_before = torch.ones(size, size, dtype=torch.bool).tril()
    return torch.where(is_before, exponents, -torch.inf).exp()


# Gated delta rule -------------------------------------------------------------------------


def _delta_token(state, q, k, v, decay, beta):
    heads = v.shape[1]
    q, k = (_per_head(x, heads) for x in (q, k))
    state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None]).exp()
    error = (v - (k[:, :, None] @ state)[:, :, 0]) * beta[..., None]
    state = state + k[..., None] * error[..., None, :]
    return state, (q[:, :, None] @ state)[:, :, 0]


def _delta_block(state, q, k, v, decay, beta):
    heads = v.shape[1]
    since_start, pairwise, until_end = _decays(decay)
    overlap = _per_head(k @ k.mT, heads) * pairwise
    scores = _per_head(q @ k.mT, heads) * pairwise
    q, k = (_per_head(x, heads) for x in (q, k))
    return _delta_update(
        state,
        q * since_start[..., None],
        k * since_start[..., None],
        k * until_end[..., None],
        v,
        beta,
        overlap,
        scores,
        since_start[..., -1:, None],
    )


def _delta_channel_block(state, q, k, v, decay, beta):
    """As `_delta_block`, with a decay for each channel of the keys: `decay` is [B, H, C, K]."""
    heads = v.shape[1]
    q, k = (_per_head(x, heads) for x in (q, k))
    total = decay.cumsum(-2)
    pairwise = _exp_of_lower_triangle((total[..., None, :] - total[..., None, :, :]).movedim(-1, -3)).movedim(-3, -1)
    weighted = k[..., None, :, :] * pairwise
    overlap, scores = ((x[..., None, :] * weighted).sum(-1) for x in (k, q))
    since_start, until_end = total.exp(), (total[..., -1:, :] - total).exp()
    return _delta_update(
        state, q * since_start, k * since_start, k * until_end, v, beta, overlap, scores, since_start[..., -1, :, None]
    )


def _delta_update(state, q_start, k_start, k_end, v, beta, overlap, scores, decay):
    """Return the state after a block of the gated delta rule, and the outputs.

    Token i adds key_i ⊗ errors_i to the state, where errors_i is beta_i * (value_i - what the state holds for key_i).
    That state includes what the earlier tokens of the block have added. The errors therefore solve the equation
    (I + beta * L) errors = beta * (v - k_start @ state), where L is `overlap` below the diagonal and zero elsewhere.
    """
    errors = _inverse(overlap.tril(-1) * beta[..., None]) @ ((v - k_start @ state) * beta[..., None])
    return state * decay + k_end.mT @ errors, q_start @ state + scores @ errors


def _inverse(lower):
    """Return the inverse of I + `lower`, for strictly lower triangular matrices whose size is a power of 2.

    The inverse of [[A, 0], [L, B]] is [[A', 0], [-B' L A', B']]. The diagonal blocks double in size in each step.
    """
    size = lower.shape[-1]
    index = torch.arange(size)
    inverse = torch.eye(size)
    width = 1
    while width < size:
        # The entries whose row is in the second half of a block of 2 * width, and whose column is in the first half.
        part = index // width
        is_between = (part[:, None] == part + 1) & (part % 2 == 0)
        inverse = inverse - inverse @ torch.where(is_between, lower, 0.0) @ inverse
        width *= 2
    return inverse


# One state for each channel ---------------------------------------------------------------


def _selective_token(state, x, step, key, query, rates):
    state = state * (step[..., None] * rates).exp() + (x * step)[..., None] * key[:, None]
    return state, (state @ query[..., None])[..., 0]


def _diagonal_token(state, x, decay):
    state = state * decay + x
    return state, state


# The operators ----------------------------------------------------------------------------


def _check(name, **shapes):
    """Raise ValueError if a tensor has another shape than expected. `shapes` maps names to (tensor, shape)."""
    for argument, (tensor, expected) in shapes.items():
        if tuple(tensor.shape) != tuple(expected):
            raise ValueError(f"mlx::{name}: {argument}: got shape {list(tensor.shape)}, expected {list(expected)}")


def _check_heads(name, query, key, value, state, **others):
    (batch, groups, length, size), (_, heads, _, width) = query.shape, value.shape
    if heads % groups:
        raise ValueError(f"mlx::{name}: value: got {heads} heads, expected a multiple of the {groups} of the query")
    _check(
        name,
        key=(key, query.shape),
        value=(value, (batch, heads, length, width)),
        state=(state, (batch, heads, size, width)),
        **{n: (x, (batch, heads, length, *[size] * (x.dim() - 3))) for n, x in others.items()},
    )


def _outputs(value, state):
    return value.new_empty(value.shape, dtype=torch.float32), state.new_empty(state.shape, dtype=torch.float32)


def _define(name, arguments, check, rule):
    """Define an operator with tensors `arguments`, and return it. Its output is like `value` or `x`."""

    def eager(*tensors):
        check(name, *tensors)
        with torch.no_grad():
            return _run(rule(tensors), tensors[:-1], tensors[-1])

    schema = ", ".join(f"Tensor {argument}" for argument in arguments)
    like = arguments.index("value") if "value" in arguments else 0
    return define(f"{name}({schema}) -> (Tensor, Tensor)", eager, lambda *tensors: _outputs(tensors[like], tensors[-1]))


def _check_linear(name, query, key, value, decay, state):
    _check_heads(name, query, key, value, state, decay=decay)


def _check_delta(name, query, key, value, decay, beta, state):
    _check_heads(name, query, key, value, state, decay=decay, beta=beta)


def _check_selective(name, x, step, key, query, rates, state):
    batch, length, width = x.shape
    size = rates.shape[-1]
    keys = batch, length, size
    _check(
        name,
        step=(step, x.shape),
        key=(key, keys),
        query=(query, keys),
        rates=(rates, (width, size)),
        state=(state, (batch, width, size)),
    )


def _check_diagonal(name, x, decay, state):
    _check(name, decay=(decay, x.shape), state=(state, (x.shape[0], x.shape[2])))


_LINEAR = Rule(_linear_token, 2, _linear_block, BLOCK)
_DELTA = Rule(_delta_token, 2, _delta_block, BLOCK)
_CHANNEL_DELTA = Rule(_delta_token, 2, _delta_channel_block, CHANNEL_BLOCK)
_SELECTIVE = Rule(_selective_token, 1, fixed=1)
_DIAGONAL = Rule(_diagonal_token, 1)


def _linear_rule(tensors):
    return _LINEAR


def _delta_rule(tensors):
    return _DELTA if tensors[3].ndim == 3 else _CHANNEL_DELTA


def _selective_rule(tensors):
    return _SELECTIVE


def _diagonal_rule(tensors):
    return _DIAGONAL


# All operators return the outputs, in the shape of `value` or `x`, and the state after the last token, both float32.

# `query` and `key` [B, G, S, K], `value` [B, H, S, V], `decay` [B, H, S], `state` [B, H, K, V]. G divides H:
# consecutive heads share a query and a key.
gated_linear_attention = _define(
    "gated_linear_attention", ("query", "key", "value", "decay", "state"), _check_linear, _linear_rule
)

# As `gated_linear_attention`, with `beta` [B, H, S]. `decay` is [B, H, S], or [B, H, S, K] for a decay of each channel.
gated_delta_rule = _define(
    "gated_delta_rule", ("query", "key", "value", "decay", "beta", "state"), _check_delta, _delta_rule
)

# `x` and `step` [B, S, D], `key` and `query` [B, S, N], `rates` [D, N], `state` [B, D, N].
selective_scan = _define(
    "selective_scan", ("x", "step", "key", "query", "rates", "state"), _check_selective, _selective_rule
)

# `x` and `decay` [B, S, W], `state` [B, W].
diagonal_recurrence = _define("diagonal_recurrence", ("x", "decay", "state"), _check_diagonal, _diagonal_rule)

RULES = {  # operator → function that returns the rule for given tensors
    gated_linear_attention: _linear_rule,
    gated_delta_rule: _delta_rule,
    selective_scan: _selective_rule,
    diagonal_recurrence: _diagonal_rule,
}
