"""What moves logits before the draw: penalties, a bias, a mask of allowed tokens.

    mlx::penalize_logits    over a window of earlier tokens
    mlx::bias_logits        of single tokens
    mlx::mask_logits        all but the allowed ones

in that order, each a text of its own that takes logits `[B, V]` of float32, float16 or bfloat16
and gives float32. With its off values each gives the numbers that it was given.
"""

from __future__ import annotations

import torch

from ..custom_ops import define

WORD = 32  # tokens in a word of the mask
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


# Penalties -----------------------------------------------------------------------------


def penalize_reference(logits, history, valid=None, repetition=None, presence=None, frequency=None):
    """Logits `[B, V]` with the tokens of `history` made less likely.

    `history` `[B, N]` int64 counts where `valid` `[B, N]` bool says so, and everywhere without
    it; what is no token of the vocabulary never counts. For a token that occurs n times in it:

        logit > 0:  logit / repetition - presence - n * frequency
        otherwise:  logit * repetition - presence - n * frequency

    Each is a tensor of one element, or None: nothing is emitted for it. Off are 1, 0 and 0; a
    `repetition` that is not above 0 counts as 1.
    """
    logits = logits.to(torch.float32)
    counts = (history >= 0) & (history < logits.shape[1])
    if valid is not None:
        counts = counts & valid
    # What does not count stands for token 0, and does to it what token 0 has coming anyway: a
    # place that comes up several times gets the same number every time.
    token = torch.where(counts, history, 0)
    times = torch.zeros_like(logits).scatter_add(1, token, counts.to(torch.float32))
    times, before = times.gather(1, token), logits.gather(1, token)
    after = before
    if repetition is not None:
        repetition = _number(repetition)
        repetition = torch.where(repetition > 0, repetition, 1.0)
        after = torch.where(after > 0, after / repetition, after * repetition)
    if presence is not None:
        after = after - _number(presence)
    if frequency is not None:
        after = after - _number(frequency) * times
    return logits.scatter(1, token, torch.where(times > 0, after, before))


def _number(x):
    return (x.reshape(()) if x.dim() else x).to(torch.float32)


def _check_penalties(logits, history, valid=None, repetition=None, presence=None, frequency=None):
    _check_logits("penalize_logits", logits)
    if history.dim() != 2 or history.shape[0] != logits.shape[0] or history.dtype != torch.int64:
        raise ValueError(
            f"mlx::penalize_logits: history is {_kind(history)}, expected int64 of shape [B, N] "
            f"with the B of the logits, {logits.shape[0]}"
        )
    if valid is not None and (valid.shape != history.shape or valid.dtype != torch.bool):
        raise ValueError(
            f"mlx::penalize_logits: valid is {_kind(valid)}, expected torch.bool of the shape of "
            f"history, {list(history.shape)}"
        )
    penalties = {"repetition": repetition, "presence": presence, "frequency": frequency}
    for name, value in penalties.items():
        if value is not None and (value.numel() != 1 or not value.is_floating_point()):
            raise ValueError(
                f"mlx::penalize_logits: {name} is {_kind(value)}, expected a floating tensor of "
                "one element"
            )


# Bias ----------------------------------------------------------------------------------


def bias_reference(logits, tokens, values):
    """Logits `[B, V]` plus `values` `[K]` at `tokens` `[K]` int64, in every row.

    A token that is named several times gets the sum. What is no token of the vocabulary gets
    nothing; a value of 0 is off.
    """
    logits = logits.to(torch.float32)
    known = (tokens >= 0) & (tokens < logits.shape[1])
    values = torch.where(known, values.to(torch.float32), 0.0)
    tokens = torch.where(known, tokens, 0)
    shape = (logits.shape[0], tokens.shape[0])
    return logits.scatter_add(1, tokens.unsqueeze(0).expand(shape), values.unsqueeze(0).expand(shape))


def _check_bias(logits, tokens, values):
    _check_logits("bias_logits", logits)
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise ValueError(f"mlx::bias_logits: tokens are {_kind(tokens)}, expected int64 of shape [K]")
    if values.shape != tokens.shape or values.dtype not in FLOATS:
        raise ValueError(
            f"mlx::bias_logits: values are {_kind(values)}, expected floating numbers of the shape "
            f"of tokens, {list(tokens.shape)}"
        )


# Mask ----------------------------------------------------------------------------------


def mask_reference(logits, allowed):
    """Logits `[B, V]`, -inf where `allowed` `[B, ceil(V / 32)]` int32 has a 0.

    Bit v % 32 of word v // 32 is that of token v; what is beyond V does not matter. A row
    without a 1 has no finite logit left, of which `mlx::sample` makes token 0.
    """
    batch, vocabulary = logits.shape
    bits = torch.pow(2, torch.arange(WORD)).to(torch.int32)  # the last one is the sign
    allowed = torch.bitwise_and(allowed.unsqueeze(-1), bits) != 0
    allowed = allowed.reshape(batch, -1)[:, :vocabulary]
    return torch.where(allowed, logits.to(torch.float32), -torch.inf)


def _check_mask(logits, allowed):
    _check_logits("mask_logits", logits)
    shape = (logits.shape[0], words_of(logits.shape[1]))
    if allowed.shape != shape or allowed.dtype != torch.int32:
        raise ValueError(
            f"mlx::mask_logits: allowed is {_kind(allowed)}, expected torch.int32 of shape "
            f"{list(shape)}: a bit for each of {logits.shape[1]} tokens"
        )


def words_of(vocabulary: int) -> int:
    """Words of a row of the mask."""
    return -(-vocabulary // WORD)


# The operators -------------------------------------------------------------------------


def _check_logits(name, logits):
    if logits.dim() != 2 or logits.dtype not in FLOATS or logits.shape[1] == 0:
        raise ValueError(
            f"mlx::{name}: logits are {_kind(logits)}, expected float32, float16 or bfloat16 of "
            "shape [B, V]"
        )


def _kind(x):
    return f"{x.dtype} of shape {list(x.shape)}"


def _define(schema, check, text):
    def eager(logits, *arguments):
        check(logits, *arguments)
        return text(logits, *arguments)

    def fake(logits, *arguments):
        check(logits, *arguments)
        return logits.new_empty(logits.shape, dtype=torch.float32)

    return define(schema, eager, fake)


penalize_logits = _define(
    "penalize_logits(Tensor logits, Tensor history, Tensor? valid=None, Tensor? repetition=None, "
    "Tensor? presence=None, Tensor? frequency=None) -> Tensor",
    _check_penalties,
    penalize_reference,
)
bias_logits = _define(
    "bias_logits(Tensor logits, Tensor tokens, Tensor values) -> Tensor", _check_bias, bias_reference
)
mask_logits = _define(
    "mask_logits(Tensor logits, Tensor allowed) -> Tensor", _check_mask, mask_reference
)

COMPOSITES = {
    penalize_logits: penalize_reference,
    bias_logits: bias_reference,
    mask_logits: mask_reference,
}
