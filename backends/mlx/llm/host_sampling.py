"""The text of the sampling head, run on the host: for programs that return logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sampling import sample_logits
from .settings import PENALTIES, Settings


def sample(
    logits: torch.Tensor,
    settings: Settings,
    seed: int,
    history: Sequence[Sequence[int]] = (),
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens `[B]` int64 of logits `[B, V]`: those that the head draws, up to the rounding of
    two devices.

    `history` are the ids of every row that the penalties look at; `allowed` is int32
    `[B, ceil(V / 32)]`. Of the two seeds `seed` counts, not that of `settings`.
    """
    names = settings.asked()
    given = {name: getattr(settings, name) for name in ("top_k", "min_p") if name in names}
    if any(name in PENALTIES for name in names):
        given |= {name: getattr(settings, name) for name in PENALTIES}
        given["history"] = _rectangle(history)
    if settings.logit_bias:
        given["bias_tokens"] = torch.tensor(list(settings.logit_bias))
        given["bias_values"] = torch.tensor(list(settings.logit_bias.values()), dtype=torch.float32)
    return sample_logits(
        logits,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=seed,
        allowed_tokens=allowed,
        **given,
    )


def _rectangle(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """`[B, N]`; -1, which is no token, where a row is shorter."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (longest - len(row))] for row in rows], dtype=torch.int64)
