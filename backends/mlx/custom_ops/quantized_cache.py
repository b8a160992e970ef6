"""Torch operators on quantized KV caches: schema, eager kernel, fake kernel.

An *entry* is what a cache holds for one position of a key head: the numbers of several tensors, such as a key and a
value, each padded with zeros to whole groups of `group_size` numbers. A group holds integers q of 4 or 8 bits, and its
numbers are q * scale + bias. The scale and the bias are rounded to the dtype of the scales before the integers are
computed. A cache of G key heads and N positions consists of two tensors:

    entries  uint8 [1, G, N, groups * group_size * bits / 8]; with 4 bits, the first of two numbers is in the low bits
    scales   [1, G, N, 2 * groups]: the scales of the groups, then their biases

With `rotate`, each group is multiplied by the orthonormal Hadamard matrix before it is quantized, which spreads an
outlier over the group. The dot product of two vectors does not change if both are rotated.

Importing this module defines the operators in the operator library `mlx`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .library import define
from .primitives import cached_attention_in_torch


class EntryFormat(NamedTuple):
    """How numbers are quantized: `bits` is 4 or 8, `group_size` 32, 64 or 128."""

    group_size: int
    bits: int
    rotate: bool

    def groups(self, width: int) -> int:
        """Return the number of groups of a tensor with `width` numbers."""
        return -(-width // self.group_size)

    def bytes(self, groups: int) -> int:
        """Return the number of bytes that the integers of `groups` groups take."""
        return groups * self.group_size * self.bits // 8


def hadamard(size: int) -> torch.Tensor:
    """Return the orthonormal Hadamard matrix [size, size], for a power of two. It is its own inverse."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def in_groups(x: torch.Tensor, format: EntryFormat) -> torch.Tensor:
    """Return `x` [..., W] as float32 [..., groups, group_size], padded with zeros; rotated if the format says so."""
    *shape, width = x.shape
    groups, x = format.groups(width), x.float()
    if missing := groups * format.group_size - width:
        x = torch.cat([x, x.new_zeros((*shape, missing))], -1)
    x = x.reshape(*shape, groups, format.group_size)
    return x @ hadamard(format.group_size) if format.rotate else x


def quantize(xs: list[torch.Tensor], format: EntryFormat, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch function of `mlx::quantize_entries`, whose arguments and results are explained below."""
    x = torch.cat([in_groups(x, format) for x in xs], -2)
    largest = 2**format.bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scales, biases = ((high - low) / largest).to(dtype), low.to(dtype)
    divisors = scales.float()
    divisors = torch.where(divisors == 0, 1.0, divisors)
    q = ((x - biases.float()) / divisors).round().clamp(0, largest)
    if format.bits == 4:
        q = q[..., ::2] + 16 * q[..., 1::2]
    q = q.to(torch.uint8).reshape(*q.shape[:-2], q.shape[-2] * q.shape[-1])
    return q, torch.cat([scales, biases], -2).squeeze(-1)


def dequantize(
    entries: torch.Tensor, scales: torch.Tensor, first: int, width: int, format: EntryFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Return `width` numbers of each entry, from group `first` on, as `dtype` [1, G, N, width]."""
    groups, total = format.groups(width), scales.shape[-1] // 2
    q = entries[..., format.bytes(first) : format.bytes(first + groups)]
    if format.bits == 4:  # of two numbers in a byte, the second one is in the high bits
        q = torch.stack([(q & 15).float(), (q & 240).float() * (1 / 16)], -1).flatten(-2)
    q = q.float().unflatten(-1, (groups, format.group_size))
    scale, bias = (scales[..., i : i + groups].float().unsqueeze(-1) for i in (first, total + first))
    x = q * scale + bias
    x = x @ hadamard(format.group_size) if format.rotate else x
    return x.flatten(-2)[..., :width].to(dtype)


def _check_format(name, group_size, bits):
    if bits not in (4, 8) or group_size not in (32, 64, 128):
        raise ValueError(
            f"mlx::{name}: got {bits} bits in groups of {group_size}, expected 4 or 8 bits in groups of 32, 64 or 128"
        )


def _quantize_entries(xs, group_size, bits, rotate, dtype):
    _check_format("quantize_entries", group_size, bits)
    return quantize(xs, EntryFormat(group_size, bits, rotate), dtype)


def _quantize_entries_fake(xs, group_size, bits, rotate, dtype):
    _check_format("quantize_entries", group_size, bits)
    format = EntryFormat(group_size, bits, rotate)
    groups, shape = sum(format.groups(x.shape[-1]) for x in xs), xs[0].shape[:-1]
    entries = xs[0].new_empty((*shape, format.bytes(groups)), dtype=torch.uint8)
    return entries, xs[0].new_empty((*shape, 2 * groups), dtype=dtype)


# Quantizes the tensors `xs` [1, G, S, ...]. Returns the entries that hold them one after the other, and their scales
# and biases, which have `dtype`.
quantize_entries = define(
    "quantize_entries(Tensor[] xs, int group_size, int bits, bool rotate, ScalarType dtype) -> (Tensor, Tensor)",
    _quantize_entries,
    _quantize_entries_fake,
)


def _quantized_attention(
    query, entries, scales, start, scale, value_offset, value_size, group_size, bits, rotate, *settings
):
    _check_format("quantized_attention", group_size, bits)
    format = EntryFormat(group_size, bits, rotate)
    if value_offset % group_size:
        raise ValueError(
            f"mlx::quantized_attention: value_offset: got {value_offset}, expected whole groups of {group_size}"
        )
    keys = dequantize(entries, scales, 0, query.shape[3], format, query.dtype)
    values = dequantize(entries, scales, value_offset // group_size, value_size, format, query.dtype)
    return cached_attention_in_torch(query, keys, values, start, scale, *settings)


# Like `cached_attention`, over a quantized cache. The key of an entry is its first D numbers. The value is the
# `value_size` numbers from index `value_offset` on. With `blocks`, attention is chunked: a query attends only to the
# positions in its own block of `window` positions, as in `cached_attention`.
quantized_attention = define(
    "quantized_attention(Tensor query, Tensor entries, Tensor scales, Tensor start, float scale, int value_offset, "
    "int value_size, int group_size, int bits, bool rotate, int? window=None, float? softcap=None, Tensor? row=None, "
    "int rows=1, bool blocks=False, Tensor? sinks=None, Tensor? slopes=None) -> Tensor",
    _quantized_attention,
    lambda query, entries, scales, start, scale, value_offset, value_size, *format, **options: query.new_empty(
        (*query.shape[:3], value_size)
    ),
)
