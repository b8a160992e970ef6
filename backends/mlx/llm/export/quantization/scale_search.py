"""Quantization with the least squared error."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....custom_ops.packing import FLOAT_MODES, decode_elements, decode_scales, pack, quantize, unpack
from . import native

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # the fractions of a group's range that `fit` tries
_ROUNDS = 2  # how often `search` alternates between integers and scales for each fraction
_STEP_ELEMENTS = 1 << 19  # how many weights are quantized at a time: few, so that they stay in the CPU's cache


@dataclass(frozen=True)
class Format:
    """One of MLX's quantized formats. `custom_ops.packing` explains the fields."""

    bits: int
    group_size: int
    mode: str = "affine"

    @classmethod
    def of(cls, mode: str) -> Format:
        """Return the format of `mode`, a mode whose scales are 8-bit floats."""
        return cls(*FLOAT_MODES[mode], mode)

    @property
    def bits_per_weight(self) -> float:
        """The bits of a weight, including its share of the scales and biases.

        In affine mode, scales and biases are half precision. In other modes, scales have 8 bits.
        """
        return self.bits + (32 if self.mode == "affine" else 8) / self.group_size


def quantized(
    w: torch.Tensor, format: Format, dtype: torch.dtype, importance: torch.Tensor | None = None
) -> list[torch.Tensor | None]:
    """Return the packed weight, scales and biases of a weight [..., K]. The biases are None in a float mode.

    Scales and biases in affine mode have `dtype`. `importance` [K] weights the errors of the columns. It has no effect
    with 8 bits, where the error is small and `fit_range` is used.

    The library of `native` quantizes the whole weight, where it can. Otherwise, torch quantizes a few rows at a time,
    with the same results.
    """
    w, searches = w.detach(), format.bits != 8
    if format.mode == "affine":
        weights = importance if searches else None
        found = native.quantize(w, format.bits, format.group_size, dtype, weights, searches=searches)
        if found is not None:
            return list(found)
    rows = w.flatten(0, -2)
    parts: list[tuple] = []
    step = max(1, _STEP_ELEMENTS // rows.shape[1])
    for first in range(0, len(rows), step):
        part = rows[first : first + step].contiguous()
        if format.mode != "affine":
            parts.append(fit_float(part, format.mode, importance))
        elif searches:
            parts.append(fit(part, format.bits, format.group_size, dtype, importance))
        else:
            parts.append(fit_range(part, format.bits, format.group_size, dtype))
    return [None if ts[0] is None else torch.cat(ts).unflatten(0, w.shape[:-1]) for ts in zip(*parts)]


def fit(
    w: torch.Tensor,
    bits: int,
    group_size: int,
    dtype: torch.dtype | None = None,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize floats [N, K] in affine mode with scales and biases that minimize the squared error.

    `importance` [K] multiplies the squared error of each column. Returns what `packing.quantize` returns.

    For each group, several ranges are tried: the range of the values, and narrower ranges, which clip the outermost
    values. A range gives a first scale and bias. Two steps then alternate: find the nearest integers for the scale and
    bias, and find the scale and bias with the least squared error for these integers.
    """
    dtype = w.dtype if dtype is None else dtype
    found = native.quantize(w.detach(), bits, group_size, dtype, importance, searches=True)
    if found is not None:
        return found
    x = w.detach().float().unflatten(-1, (-1, group_size))
    scales, biases = search(x, bits, dtype, _grouped(importance, group_size))
    return pack(integers(x, scales, biases, bits).to(torch.uint8).flatten(-2), bits), scales, biases


def fit_range(
    w: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize floats [N, K] in affine mode over the range of each group. Returns what `packing.quantize` returns.

    The range is that of the values, or one that is symmetric about 0, whichever has the smaller squared error. The
    symmetric range is exact for weights that were quantized symmetrically, as in GGUF's Q8_0.
    """
    q, scales, biases = quantize(w, bits, group_size, dtype)
    x = w.detach().float().unflatten(-1, (-1, group_size))
    codes = unpack(q, bits).unflatten(-1, (-1, group_size))
    step = (x.abs().amax(-1) / (2 ** (bits - 1) - 1)).clamp(min=1e-7).to(dtype)
    origin = step * -(2 ** (bits - 1))
    symmetric = integers(x, step, origin, bits)
    candidates = ((codes, scales, biases), (symmetric, step, origin))
    errors = [_values(*candidate).sub_(x).square_().sum(-1) for candidate in candidates]
    is_better = errors[1] < errors[0]
    codes = torch.where(is_better.unsqueeze(-1), symmetric.to(torch.uint8), codes)
    return pack(codes.flatten(-2), bits), torch.where(is_better, step, scales), torch.where(is_better, origin, biases)


def search(
    x: torch.Tensor, bits: int, dtype: torch.dtype, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and biases, [...] of `dtype`, for groups of floats [..., G]. `fit` explains the method.

    `importance` broadcasts to the shape of `x`.
    """
    minimum, maximum = x.amin(-1), x.amax(-1)
    if importance is None:
        total, mean_x = x.shape[-1], x.sum(-1) / x.shape[-1]
    else:
        total = importance.expand_as(x).sum(-1)
        mean_x = (x * importance).sum(-1) / total
    best, q = None, torch.empty_like(x)  # the memory of `q` is used again for each fraction
    for shrink in _SHRINKS:
        scales = ((maximum - minimum) * shrink / (2**bits - 1)).clamp_(min=1e-7)
        biases = minimum + (maximum - minimum) * ((1 - shrink) / 2)
        for _ in range(_ROUNDS):
            integers(x, scales, biases, bits, out=q)
            scales, biases = _least_squares(x, mean_x, q, importance, total, scales, biases)
        scales, biases = scales.to(dtype), biases.to(dtype)
        errors = _in_place_values(integers(x, scales, biases, bits, out=q), scales, biases).sub_(x).square_()
        error = (errors if importance is None else errors.mul_(importance)).sum(-1)
        if best is None:
            best = [error, scales, biases]
        else:
            is_better = error < best[0]
            best = [torch.where(is_better, new, old) for new, old in zip((error, scales, biases), best)]
    return best[1], best[2]


def integers(
    x: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, bits: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the quantized groups of floats [..., G]: the nearest integers for the scales and biases, as float32.

    The result is written to `out`, if it is given.
    """
    scales, biases = scales.float().unsqueeze(-1), biases.float().unsqueeze(-1)
    return torch.sub(x, biases, out=out).div_(scales).round_().clamp_(0, 2**bits - 1)


def _values(q, scales, biases):
    return q.mul(scales.float().unsqueeze(-1)).add_(biases.float().unsqueeze(-1))


def _in_place_values(q, scales, biases):
    return q.mul_(scales.float().unsqueeze(-1)).add_(biases.float().unsqueeze(-1))


def _least_squares(x, mean_x, q, importance, total, scales, biases):
    """Return the scales and biases that minimize the weighted squared error for the integers `q`, which it overwrites.

    `total` is the sum of `importance` in a group, and `mean_x` the weighted mean of `x`. If all integers of a group are
    equal, its old scale and bias are returned.
    """
    mean_q = (q if importance is None else q * importance).sum(-1) / total
    q = q.sub_(mean_q.unsqueeze(-1))
    weighted = q if importance is None else q * importance
    product = weighted * q
    variance = product.sum(-1)
    covariance = torch.mul(weighted, x, out=product).sum(-1)
    slope = covariance / variance
    is_valid = (variance > 0) & (slope > 1e-7)
    scales = torch.where(is_valid, slope, scales)
    return scales, torch.where(is_valid, mean_x - scales * mean_q, biases)


def _grouped(importance: torch.Tensor | None, group_size: int) -> torch.Tensor | None:
    return None if importance is None else importance.unflatten(-1, (-1, group_size))


# 8-bit floats as scales ------------------------------------------------------------------


def fit_float(
    w: torch.Tensor, mode: str, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Like `fit`, in a mode whose scales are 8-bit floats. Returns (packed, scales, None)."""
    bits, group_size = FLOAT_MODES[mode]
    x = w.detach().float().unflatten(-1, (-1, group_size))
    importance = torch.ones(group_size, device=x.device) if importance is None else _grouped(importance, group_size)
    full_scale = x.abs().amax(-1) / (6.0 if bits == 4 else 448.0)
    best = None
    for scales in _float_scales(full_scale, mode):
        divisor = decode_scales(scales, mode).unsqueeze(-1)
        elements = _float_elements(x / torch.where(divisor == 0, 1, divisor), bits)
        error = (decode_elements(elements, bits) * divisor - x).square_().mul_(importance).sum(-1)
        if best is None:
            best = [error, scales, elements]
        else:
            is_better = error < best[0]
            best = [
                torch.where(is_better, error, best[0]),
                torch.where(is_better, scales, best[1]),
                torch.where(is_better.unsqueeze(-1), elements, best[2]),
            ]
    return pack(best[2].flatten(-2), bits), best[1], None


def _float_scales(full_scale: torch.Tensor, mode: str) -> list[torch.Tensor]:
    """Return the scales to try, as bytes.

    `full_scale` is the scale with which the largest element stands for the largest magnitude in a group.
    """
    if mode == "nvfp4":
        tried = (full_scale * shrink for shrink in (1.1, *_SHRINKS))
        return [t.clamp(2.0**-9, 448).to(torch.float8_e4m3fn).view(torch.uint8) for t in tried]
    exponent = full_scale.clamp(min=2.0**-126).log2().floor()
    return [(exponent + 127 + step).clamp(0, 254).to(torch.uint8) for step in (0, 1)]


def _float_elements(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the elements, as uint8, that are nearest to the scaled values `x`."""
    if bits == 8:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    values = decode_elements(torch.arange(8, dtype=torch.uint8), 4)
    index = torch.bucketize(x.abs(), (values[1:] + values[:-1]) / 2).to(torch.uint8)
    return index | (x < 0).to(torch.uint8) << 3
