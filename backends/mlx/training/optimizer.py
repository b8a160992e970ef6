"""AdamW as a function of tensors, clipping of gradients, and schedules of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).

    `max_norm` limits the norm of all gradients together; None leaves them as they are. The other settings are those of
    `torch.optim.AdamW`.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float | None = None

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"AdamW: betas: got {self.betas}, expected numbers from 0 to 1, exclusive")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"AdamW: max_norm: got {self.max_norm}, expected a number above 0")

    def update(
        self,
        parameter: torch.Tensor,
        grad: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
        lr: torch.Tensor,
        step: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the new parameter, and the new averages of the gradient and of its square.

        `lr` is a float and `step` an int64, both 0-d; the first step is 1. All other tensors are float32.
        """
        first, second = self.betas
        grad = grad if self.max_norm is None else clipped(grad, self.max_norm)
        mean = first * mean + (1 - first) * grad
        square = second * square + (1 - second) * grad * grad
        corrections = [_one_minus_power(beta, step) for beta in self.betas]
        denominator = torch.sqrt(square / corrections[1]) + self.eps
        parameter = parameter * (1 - lr * self.weight_decay) - lr / corrections[0] * mean / denominator
        return parameter, mean, square


def _one_minus_power(beta: float, step: torch.Tensor) -> torch.Tensor:
    """Return 1 - beta^step, with the precision of float32 also where the power is almost 1."""
    return -torch.expm1(step.float() * math.log(beta)) if beta else torch.ones((), dtype=torch.float32)


def clipped(grad: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return `grad` with a norm of at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` computes it."""
    norm = torch.linalg.vector_norm(grad)
    return grad * torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def constant(lr: float, steps: int, warmup: int = 0) -> Callable[[int], float]:
    """Return the schedule with a linear warm-up over `warmup` steps, and then `lr`. The first step is 1."""
    return lambda step: lr * min(1.0, step / max(warmup, 1))


def cosine(lr: float, steps: int, warmup: int = 0, final: float = 0.0) -> Callable[[int], float]:
    """Return the schedule with a linear warm-up, and then half a cosine from `lr` down to `final` at step `steps`."""

    def schedule(step: int) -> float:
        if step <= warmup:
            return lr * step / warmup
        progress = min(1.0, (step - warmup) / max(steps - warmup, 1))
        return final + (lr - final) * (1 + math.cos(math.pi * progress)) / 2

    return schedule


SCHEDULES = {"constant": constant, "cosine": cosine}
