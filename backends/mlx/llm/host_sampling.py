"""The text of the sampling head, run on the host: for programs that return logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..custom_kernel_ops import penalties
from ..custom_kernel_ops.sample import sample as draw
from .settings import PENALTIES, Settings


def sample(
    logits: torch.Tensor,
    settings: Settings,
    seed: int,
    history: Sequence[Sequence[int]] = (),
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens `[B]` int64 of logits `[B, V]`: those that the head would draw, up to the rounding
    of two devices.

    `history` are the ids of every row that the penalties look at; `allowed` int32
    `[B, ceil(V / 32)]`. `settings.seed` does not count, `seed` does.
    """
    on = set(settings.asked())
    if on.intersection(PENALTIES):
        history = _rectangle(history)
        values = [_float(getattr(settings, name)) for name in PENALTIES]
        logits = penalties.penalize_logits(logits, history, None, *values)
    if settings.logit_bias:
        tokens = torch.tensor(list(settings.logit_bias), dtype=torch.int64)
        logits = penalties.bias_logits(logits, tokens, _float(list(settings.logit_bias.values())))
    if allowed is not None:
        logits = penalties.mask_logits(logits, allowed)
    return draw(
        logits,
        _float(settings.temperature),
        _float(settings.top_p),
        torch.tensor(seed, dtype=torch.int64),
        torch.tensor(settings.top_k, dtype=torch.int64) if "top_k" in on else None,
        _float(settings.min_p) if "min_p" in on else None,
    )


def _float(value) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _rectangle(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """`[B, N]`; -1, which is no token, where a row is shorter."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (longest - len(row))] for row in rows], dtype=torch.int64)
