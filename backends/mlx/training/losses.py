"""Losses. All of them compute in float32, and return a 0-d tensor."""

from __future__ import annotations

import torch


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of -log p(target) over all tokens, or over those whose `mask` is not 0.

    `logits` are `[..., V]`, `targets` int64 `[...]` in [0, V), and `mask` `[...]`. With weights other than 0 and 1 in
    `mask`, the mean is weighted. If the mask is 0 everywhere, the loss is 0. The logarithm of p is the logit minus the
    log-sum-exp of all logits.
    """
    total, count = summed_cross_entropy(logits, targets, mask)
    return total / count.clamp(min=torch.finfo(torch.float32).tiny)


def summed_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum, and the number of tokens or the sum of `mask`. The arguments are those of `cross_entropy`."""
    losses = token_losses(logits, targets)
    weights = torch.ones_like(losses) if mask is None else mask.float()
    return (losses * weights).sum(), weights.sum()


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return -log p(target) of each token. `fused.fused_gradients` replaces this function."""
    logits = logits.float()
    return torch.logsumexp(logits, -1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def mean_squared_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares of `prediction - target`."""
    return (prediction.float() - target.float()).square().mean()
