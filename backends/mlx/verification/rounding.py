"""Compares values, with a tolerance from eager runs with rounding noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .noise import EPSILON

SPREAD_FACTOR = 8  # a result may lie this many times as far from eager torch as the noisy runs do


@dataclass(frozen=True)
class Comparison:
    """The comparison of one tensor or number with that of eager torch.

    - `difference`: the largest absolute difference of an element.
    - `excess`: the largest ratio, over all elements, of the difference of an element to its tolerance. The values agree
      within rounding if it is at most 1.
    - `tolerance`: the tolerance of the element with that ratio. This may be another element than that with the largest
      difference.
    - `mismatch`: what differs if the values cannot be compared, such as their shapes; otherwise None.
    """

    difference: float
    tolerance: float
    excess: float
    mismatch: str | None = None

    @property
    def ok(self) -> bool:
        return self.mismatch is None and self.excess <= 1


def compare(actual: Any, expected: Any, noisy: Sequence[Any], factor: float = SPREAD_FACTOR) -> Comparison:
    """Compare a value with that of eager torch, `expected`.

    `noisy` are the values of eager runs under `noise.RoundingNoise`. The spread of an element is how far these lie from
    `expected`, or the root mean square of that along the last dimension if this is larger. The tolerance of an element
    is `factor` times its spread, plus a few rounding errors of the element itself. An integer or boolean may
    differ only where a noisy run differs from `expected`. Whether an element is infinite or NaN may differ only where
    this differs in a noisy run.
    """
    actual, expected, *noisy = (torch.as_tensor(v) for v in (actual, expected, *noisy))
    if actual.shape != expected.shape:
        return _mismatch(f"got shape {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.is_floating_point() != expected.is_floating_point():
        return _mismatch(f"got {_dtype_name(actual.dtype)}, expected {_dtype_name(expected.dtype)}")
    if expected.numel() == 0:
        return Comparison(0.0, 0.0, 0.0)
    tolerance = tolerance_of(expected, [run for run in noisy if run.shape == expected.shape], factor)
    a, e = actual.double(), expected.double()
    same = (a == e) | (a.isnan() & e.isnan())
    difference = torch.where(same, 0.0, (a - e).abs().nan_to_num(torch.inf, torch.inf))
    excess = torch.where(same, 0.0, torch.where(tolerance.isinf(), 0.0, difference / tolerance))
    worst = int(excess.reshape(-1).argmax())
    if excess.max() == 0:
        worst = int(difference.reshape(-1).argmax())
    return Comparison(float(difference.max()), float(tolerance.reshape(-1)[worst]), float(excess.reshape(-1)[worst]))


def agree(tokens: torch.Tensor, logits: torch.Tensor, noisy: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return, for each token `[B]`, whether its eager logit is the largest of `logits` `[B, V]` within rounding.

    `noisy` are the logits of eager runs with rounding noise.
    """
    tolerance = tolerance_of(logits, noisy)
    best = logits.argmax(-1, keepdim=True)
    chosen = tokens.reshape(-1, 1)
    is_valid = (chosen >= 0) & (chosen < logits.shape[1])
    chosen = chosen.clamp(0, logits.shape[1] - 1)
    gap = logits.gather(1, best) - logits.gather(1, chosen)
    return (is_valid & (gap <= tolerance.gather(1, best) + tolerance.gather(1, chosen))).reshape(-1)


def _mismatch(message: str) -> Comparison:
    return Comparison(float("inf"), 0.0, float("inf"), message)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tolerance_of(expected: torch.Tensor, noisy: Sequence[torch.Tensor], factor: float = SPREAD_FACTOR) -> torch.Tensor:
    """Return the tolerance of each element, float64.

    It is infinite where rounding noise changes an integer or boolean, or changes whether a float is infinite or NaN.
    """
    e = expected.double()
    runs = torch.stack([e, *(run.double() for run in noisy)])
    if not expected.is_floating_point():
        return torch.where((runs == e).all(0), 0.0, torch.inf)
    determined = (runs.isnan() == e.isnan()).all(0) & (runs.isinf() == e.isinf()).all(0)
    spread = (runs - e).abs().nan_to_num(0, 0, 0).amax(0)
    if spread.ndim:
        spread = spread.maximum(spread.square().mean(-1, keepdim=True).sqrt())
    epsilon = EPSILON.get(expected.dtype, EPSILON[torch.float32])
    size = e.abs().nan_to_num(0, 0, 0)
    tolerance = factor * spread + 4 * epsilon * size + epsilon * min(float(size.max()), 1.0)
    return torch.where(determined, tolerance, torch.inf)
