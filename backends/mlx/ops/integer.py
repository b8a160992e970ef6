"""Lowers `gcd` and `lcm` to Euclid's algorithm, with as many steps as the dtype can need."""

from __future__ import annotations

import math

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY
from .lib.loop import emit_loop

aten = torch.ops.aten


def _euclid_step(a, b, step):
    """Replace (a, b) by (b, a mod b), unless b is 0.

    Only the lowest integer is negative here. As in torch, the remainder is that of C.
    """
    done = b == 0
    remainder = torch.fmod(a, torch.where(done, 1, b))
    return [torch.where(done, a, b), torch.where(done, 0, remainder)]


def _magnitudes(dtype):
    def function(a, b):
        return [v.abs().contiguous() for v in torch.broadcast_tensors(a.to(dtype), b.to(dtype))]

    return function


@REGISTRY.lower(aten.gcd.default)
def gcd(P: Lowering, self, other):
    dtype = P.out.dtype
    # Consecutive Fibonacci numbers need the most steps, and they grow by the golden ratio.
    steps = math.ceil(torch.iinfo(dtype).bits / math.log2((1 + math.sqrt(5)) / 2))
    # The loop runs once for each element. The values are not used.
    iterations = P.constant("steps", torch.zeros(steps, dtype=torch.bool))
    return emit_loop(P, _euclid_step, P.trace(_magnitudes(dtype), other, self), [iterations])[0]


@REGISTRY.lower(aten.lcm.default)
def lcm(P: Lowering, self, other):
    return P.trace(_least_common_multiple, self, other, gcd(P, self, other))[0]


def _least_common_multiple(a, b, divisor):
    quotient = torch.div(a, torch.where(divisor == 0, 1, divisor), rounding_mode="trunc")
    dtype = quotient.dtype
    wide = dtype if dtype.itemsize > 4 else torch.int32  # as in C, where the sign of the product counts before it wraps
    return torch.where(divisor == 0, 0, (quotient.to(wide) * b.to(wide)).abs()).to(dtype)
