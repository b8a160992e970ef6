"""Compares values, with a tolerance from eager runs in which every intermediate value has a random rounding error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# The relative rounding error of one operation, by dtype: two units in the last place of float32
# and float64, one of the others.
EPSILON = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float64: 2**-51}
SPREAD_FACTOR = 8  # a result may lie this many times as far from eager torch as the noisy runs do

# Operators that move, select, compare or convert values without a rounding error of their own.
_EXACT = frozenset(
    """_to_copy _to_dim_order_copy abs alias_copy amax amin arange argmax argmin as_strided_copy bitwise_and bitwise_not
    bitwise_or cat ceil clamp clone constant_pad_nd copy detach detach_copy embedding empty empty_strided expand_copy
    fill flip floor full full_like gather getitem index index_put index_select lift_fresh_copy masked_fill max
    max_pool2d_with_indices maximum min minimum neg new_empty new_full new_ones new_zeros ones ones_like permute_copy
    relu repeat roll round scalar_tensor scatter select_copy select_scatter sign slice_copy slice_scatter sort
    split_copy split_with_sizes_copy squeeze_copy stack t_copy topk transpose_copy tril triu trunc unbind_copy
    unfold_copy unsqueeze_copy view_copy where zeros zeros_like cache_update""".split()
)


class RoundingNoise(TorchDispatchMode):
    """While active, eager torch multiplies each floating-point element that it computes by 1 + epsilon or 1 - epsilon.

    The sign is random. `EPSILON` has epsilon for each dtype. Operators without rounding, and those that write to an
    argument or return a view, keep their results.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload) or _is_exact(func):
            return result
        return tree_map_only(torch.Tensor, self.perturbed, result)

    def perturbed(self, value: torch.Tensor) -> torch.Tensor:
        if value.dtype not in EPSILON or type(value) is not torch.Tensor:
            return value
        dtype = torch.promote_types(value.dtype, torch.float32)
        factor = torch.empty(value.shape, dtype=dtype).bernoulli_(0.5, generator=self.generator)
        factor.mul_(2 * EPSILON[value.dtype]).add_(1 - EPSILON[value.dtype])
        return factor.mul_(value).to(value.dtype)


def _is_exact(func: torch._ops.OpOverload) -> bool:
    """Whether `func` computes without rounding, writes to an argument, or returns an argument or a view of one."""
    schema = func._schema
    aliases = any(v.alias_info is not None for v in (*schema.arguments, *schema.returns))
    return aliases or schema.name.partition("::")[2] in _EXACT


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


def compare(actual: Any, expected: Any, noisy: Sequence[Any]) -> Comparison:
    """Compare a value with that of eager torch, `expected`.

    `noisy` are the values of eager runs under `RoundingNoise`. The spread of an element is how far these lie from
    `expected`, or the root mean square of that along the last dimension if this is larger. The tolerance of an element
    is `SPREAD_FACTOR` times its spread, plus a few rounding errors of the element itself. An integer or boolean may
    differ only where a noisy run differs from `expected`. The same holds for being infinite or NaN.
    """
    actual, expected, *noisy = (torch.as_tensor(v) for v in (actual, expected, *noisy))
    if actual.shape != expected.shape:
        return _mismatch(f"got shape {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.is_floating_point() != expected.is_floating_point():
        return _mismatch(f"got {_dtype_name(actual.dtype)}, expected {_dtype_name(expected.dtype)}")
    if expected.numel() == 0:
        return Comparison(0.0, 0.0, 0.0)
    tolerance = tolerance_of(expected, [run for run in noisy if run.shape == expected.shape])
    a, e = actual.double(), expected.double()
    same = (a == e) | (a.isnan() & e.isnan())
    difference = torch.where(same, 0.0, (a - e).abs().nan_to_num(torch.inf, torch.inf))
    excess = torch.where(same, 0.0, torch.where(tolerance.isinf(), 0.0, difference / tolerance))
    worst = int(excess.reshape(-1).argmax())
    if excess.max() == 0:
        worst = int(difference.reshape(-1).argmax())
    return Comparison(float(difference.max()), float(tolerance.reshape(-1)[worst]), float(excess.reshape(-1)[worst]))


def _mismatch(message: str) -> Comparison:
    return Comparison(float("inf"), 0.0, float("inf"), message)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tolerance_of(expected: torch.Tensor, noisy: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the tolerance of each element, float64.

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
    tolerance = SPREAD_FACTOR * spread + 4 * epsilon * size + epsilon * min(float(size.max()), 1.0)
    return torch.where(determined, tolerance, torch.inf)
