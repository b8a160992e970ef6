"""Log probabilities of tokens under the model's own distribution, `log_softmax(logits)` in float32:

    mlx::token_logprobs    of one token of each sequence
    mlx::top_logprobs      of the most likely tokens of each sequence

Both take `enabled`, int64, of one element or `[B]`. The results of a sequence whose `enabled` is 0 are 0. If `enabled`
is 0 for all sequences, the log probabilities are not computed.
"""

from __future__ import annotations

import torch

from ..custom_ops.library import define
from .checks import check_logits, describe, fits_rows, is_per_row
from .sampling.logits import replace_nan_and_inf, row_max, split_blocks, split_columns

BLOCK = 64  # tokens in a block of the search for the most likely tokens


def token_logprobs_definition(logits, tokens, enabled):
    """Return the log probability of `tokens` `[B]` under `logits` `[B, V]`, float32 `[B]`.

    It is -inf for a token outside of the vocabulary.
    """

    def compute(logits, tokens, enabled):
        logits = replace_nan_and_inf(logits.to(torch.float32))
        known = (tokens >= 0) & (tokens < logits.shape[1])
        chosen = logits.gather(1, torch.where(known, tokens, 0).unsqueeze(1))
        logprobs = torch.where(known, _logprobs(chosen, logits).squeeze(1), -torch.inf)
        return [torch.where(_enabled_rows(enabled, logits), logprobs, 0.0)]

    def zeros(logits, tokens, enabled):
        return [torch.zeros_like(tokens, dtype=torch.float32)]

    return _if_enabled(compute, zeros, logits, tokens, enabled)[0]


def top_logprobs_definition(logits, enabled, count):
    """Return the `count` most likely tokens, int64 `[B, count]`, and their log probabilities, float32 `[B, count]`.

    The tokens are in descending order of their probability. Tokens with equal logits are in ascending order.
    """

    def compute(logits, enabled):
        logits = replace_nan_and_inf(logits.to(torch.float32))
        tokens, values = _top_tokens(logits, count)
        on = _enabled_rows(enabled, logits).unsqueeze(1)
        return [torch.where(on, tokens, 0), torch.where(on, _logprobs(values, logits), 0.0)]

    def zeros(logits, enabled):
        return [torch.zeros_like(logits[:, :count], dtype=dtype) for dtype in (torch.int64, torch.float32)]

    return _if_enabled(compute, zeros, logits, enabled)


def _if_enabled(compute, zeros, *operands):
    """Return `compute(*operands)` if any element of the last operand is nonzero, else `zeros(*operands)`."""
    return torch.ops.higher_order.cond((operands[-1] != 0).any(), compute, zeros, operands)


def _enabled_rows(enabled, logits):
    return (enabled if is_per_row(enabled) else enabled.reshape(1)).expand(logits.shape[:1]) != 0


def _logprobs(chosen, logits):
    """Return the log probabilities of tokens with the logits `chosen` `[B, N]`, among all `logits` `[B, V]`."""
    top = row_max(logits)
    # A sum in two steps is faster in MLX, and more precise.
    total = split_columns(torch.exp(logits - top), 64, padding=0.0).sum(1).sum(-1, keepdim=True)
    return torch.where(chosen > -torch.inf, (chosen - top) - torch.log(total), -torch.inf)


def _top_tokens(logits, count):
    """Return the `count` largest logits and their tokens, as (tokens, logits).

    The `count` largest logits lie in the `count` blocks with the largest maxima. Of blocks with equal maxima, those
    with lower token ids are chosen.
    """
    blocks = split_blocks(logits, BLOCK)
    chosen = torch.sort(-blocks.amax(-1), dim=-1, stable=True).indices[:, :count]
    chosen = torch.sort(chosen, -1).values
    size = blocks.shape[2]
    values = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, size)).flatten(1)
    tokens = (chosen.unsqueeze(-1) * size + torch.arange(size)).flatten(1)
    negated, order = torch.sort(-values, dim=-1, stable=True)
    return tokens.gather(1, order)[:, :count], -negated[:, :count]


# The operators -------------------------------------------------------------------------


def _check(name, logits, enabled):
    check_logits(name, logits)
    if enabled.dtype != torch.int64 or not fits_rows(enabled, logits.shape[0]):
        raise ValueError(
            f"mlx::{name}: enabled: got {describe(enabled)}, expected int64 of one element or of shape "
            f"[{logits.shape[0]}]"
        )


def _token_eager(logits, tokens, enabled):
    _check_token(logits, tokens, enabled)
    return token_logprobs_definition(logits, tokens, enabled)


def _token_fake(logits, tokens, enabled):
    _check_token(logits, tokens, enabled)
    return logits.new_empty(logits.shape[:1], dtype=torch.float32)


def _check_token(logits, tokens, enabled):
    _check("token_logprobs", logits, enabled)
    if tokens.shape != logits.shape[:1] or tokens.dtype != torch.int64:
        raise ValueError(
            f"mlx::token_logprobs: tokens: got {describe(tokens)}, expected int64 of shape [{logits.shape[0]}]"
        )


def _top_eager(logits, enabled, count):
    _check_top(logits, enabled, count)
    return tuple(top_logprobs_definition(logits, enabled, count))


def _top_fake(logits, enabled, count):
    _check_top(logits, enabled, count)
    shape = (logits.shape[0], count)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


def _check_top(logits, enabled, count):
    _check("top_logprobs", logits, enabled)
    if not 1 <= count <= logits.shape[1]:
        raise ValueError(f"mlx::top_logprobs: count: got {count}, expected 1 to {logits.shape[1]}")


token_logprobs = define(
    "token_logprobs(Tensor logits, Tensor tokens, Tensor enabled) -> Tensor", _token_eager, _token_fake
)
top_logprobs = define(
    "top_logprobs(Tensor logits, Tensor enabled, int count) -> (Tensor, Tensor)", _top_eager, _top_fake
)

COMPOSITES = {token_logprobs: token_logprobs_definition, top_logprobs: top_logprobs_definition}
