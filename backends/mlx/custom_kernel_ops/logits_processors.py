"""Logits processors, which change the logits before `mlx::sample` draws:

    mlx::penalize_logits    penalizes tokens of the recent history
    mlx::bias_logits        adds a bias to some tokens
    mlx::mask_logits        excludes all but the allowed tokens

A model applies them in this order. Each takes logits `[B, V]` of float32, float16 or bfloat16 and returns float32. If
its parameters have their off values, an operator returns the logits unchanged, as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..custom_ops.library import define
from .checks import FLOATS, check_logits, describe, fits_rows, is_per_row

TOKENS_PER_WORD = 32  # an integer of the mask has a bit for each of 32 tokens


# Penalties -----------------------------------------------------------------------------


def penalize_definition(logits, history, valid=None, repetition=None, presence=None, frequency=None):
    """Penalize the tokens in `history`.

    `history` is int64 `[B, N]`. An entry counts if `valid`, bool `[B, N]`, is True for it; without `valid`, all entries
    count. Ids outside of the vocabulary never count. The logit of a token that occurs n times becomes

        logit / repetition - presence - n * frequency    if logit > 0
        logit * repetition - presence - n * frequency    otherwise

    Each penalty is a tensor of one element, a tensor `[B]` with a value for each sequence, or None. For a penalty that
    is None, no instruction is emitted. The off values of repetition, presence and frequency are 1, 0 and 0. A
    `repetition` of 0 or less, or NaN, counts as 1.
    """
    logits = logits.to(torch.float32)
    is_counted = (history >= 0) & (history < logits.shape[1])
    if valid is not None:
        is_counted = is_counted & valid
    # An entry that does not count is treated as token 0. This changes nothing: the entry adds 0 to the occurrences of
    # token 0, and the scatter below writes the same value for all entries of a token.
    token = torch.where(is_counted, history, 0)
    occurrences = torch.zeros_like(logits).scatter_add(1, token, is_counted.to(torch.float32))
    occurrences, before = occurrences.gather(1, token), logits.gather(1, token)
    after = before
    if repetition is not None:
        repetition = _as_float32(repetition)
        repetition = torch.where(repetition > 0, repetition, 1.0)
        after = torch.where(after > 0, after / repetition, after * repetition)
    if presence is not None:
        after = after - _as_float32(presence)
    if frequency is not None:
        after = after - _as_float32(frequency) * occurrences
    return logits.scatter(1, token, torch.where(occurrences > 0, after, before))


def _as_float32(x):
    """Return `x` as float32, 0-d or `[B, 1]`."""
    if is_per_row(x):
        return x.to(torch.float32).unsqueeze(1)
    return (x.reshape(()) if x.dim() else x).to(torch.float32)


def _check_penalties(logits, history, valid=None, repetition=None, presence=None, frequency=None):
    check_logits("penalize_logits", logits)
    if history.dim() != 2 or history.shape[0] != logits.shape[0] or history.dtype != torch.int64:
        raise ValueError(
            f"mlx::penalize_logits: history: got {describe(history)}, expected torch.int64 of shape "
            f"[{logits.shape[0]}, N]"
        )
    if valid is not None and (valid.shape != history.shape or valid.dtype != torch.bool):
        raise ValueError(
            f"mlx::penalize_logits: valid: got {describe(valid)}, expected torch.bool of shape {list(history.shape)}"
        )
    penalties = {"repetition": repetition, "presence": presence, "frequency": frequency}
    for name, value in penalties.items():
        if value is None:
            continue
        if not fits_rows(value, logits.shape[0]) or not value.is_floating_point():
            raise ValueError(
                f"mlx::penalize_logits: {name}: got {describe(value)}, expected a floating-point tensor of one "
                f"element or of shape [{logits.shape[0]}]"
            )


# Bias ----------------------------------------------------------------------------------


def bias_definition(logits, tokens, values):
    """Add `values` `[K]` to the logits of `tokens`, int64 `[K]`, in every sequence.

    If `tokens` and `values` are `[B, K]`, each sequence has tokens and values of its own. Repeated tokens get the sum
    of their values. Ids outside of the vocabulary are ignored. The off value is 0.
    """
    logits = logits.to(torch.float32)
    known = (tokens >= 0) & (tokens < logits.shape[1])
    values = torch.where(known, values.to(torch.float32), 0.0)
    tokens = torch.where(known, tokens, 0)
    if tokens.dim() == 1:
        shape = (logits.shape[0], tokens.shape[0])
        tokens, values = (x.unsqueeze(0).expand(shape) for x in (tokens, values))
    return logits.scatter_add(1, tokens, values)


def _check_bias(logits, tokens, values):
    check_logits("bias_logits", logits)
    has_shape = tokens.dim() == 1 or tokens.dim() == 2 and tokens.shape[0] == logits.shape[0]
    if not has_shape or tokens.dtype != torch.int64:
        raise ValueError(
            f"mlx::bias_logits: tokens: got {describe(tokens)}, expected torch.int64 of shape [K] or "
            f"[{logits.shape[0]}, K]"
        )
    if values.shape != tokens.shape or values.dtype not in FLOATS:
        raise ValueError(
            f"mlx::bias_logits: values: got {describe(values)}, expected float32, float16 or bfloat16 of shape "
            f"{list(tokens.shape)}"
        )


# Mask ----------------------------------------------------------------------------------


def mask_definition(logits, allowed):
    """Set the logits of all tokens whose bit in `allowed` is 0 to -inf.

    `allowed` is int32 `[B, ceil(V / 32)]`. Bit v % 32 of the integer at v // 32 belongs to token v. Bits beyond V are
    ignored. If no token of a sequence is allowed, `mlx::sample` returns token 0.
    """
    bits = torch.pow(2, torch.arange(TOKENS_PER_WORD)).to(torch.int32)  # the last one is the sign bit
    allowed = torch.bitwise_and(allowed.unsqueeze(-1), bits) != 0
    allowed = allowed.flatten(1)[:, : logits.shape[1]]
    return torch.where(allowed, logits.to(torch.float32), -torch.inf)


def _check_mask(logits, allowed):
    check_logits("mask_logits", logits)
    shape = (logits.shape[0], mask_word_count(logits.shape[1]))
    if allowed.shape != shape or allowed.dtype != torch.int32:
        raise ValueError(
            f"mlx::mask_logits: allowed: got {describe(allowed)}, expected torch.int32 of shape "
            f"{list(shape)}, a bit for each of {logits.shape[1]} tokens"
        )


def mask_word_count(vocabulary: int) -> int:
    """Return the number of 32-bit integers in the mask of a sequence: ceil(vocabulary / 32)."""
    return -(-vocabulary // TOKENS_PER_WORD)


# The operators -------------------------------------------------------------------------


def _define(schema, check, function):
    def eager(logits, *arguments):
        check(logits, *arguments)
        return function(logits, *arguments)

    def fake(logits, *arguments):
        check(logits, *arguments)
        return logits.new_empty(logits.shape, dtype=torch.float32)

    return define(schema, eager, fake)


penalize_logits = _define(
    "penalize_logits(Tensor logits, Tensor history, Tensor? valid=None, Tensor? repetition=None, "
    "Tensor? presence=None, Tensor? frequency=None) -> Tensor",
    _check_penalties,
    penalize_definition,
)
bias_logits = _define(
    "bias_logits(Tensor logits, Tensor tokens, Tensor values) -> Tensor", _check_bias, bias_definition
)
mask_logits = _define("mask_logits(Tensor logits, Tensor allowed) -> Tensor", _check_mask, mask_definition)

COMPOSITES: dict[Any, Callable] = {
    penalize_logits: penalize_definition,
    bias_logits: bias_definition,
    mask_logits: mask_definition,
}
