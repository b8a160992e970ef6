"""Lowers `mlx::random_bits` to `RandomBitsNode`, and torch's random operators to functions of random bits.

torch's operators take no seed. Each call draws from MLX's own sequence of keys, so that the numbers are not those of
torch. `executorch_mlx.random.seed_random_ops` makes them a function of a seed.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported, tracing_handler
from ..builder.slots import ValueSlot
from ..random import distributions
from ..random.torch_operators import FROM_TENSORS
from ..serialization import ir

aten = torch.ops.aten


@REGISTRY.lower(torch.ops.mlx.random_bits.default)
def random_bits(P: Lowering, shape, seed=None, width=4):
    return P.emit(ir.RandomBitsNode, shape=shape, seed=None if seed is None else P.item(seed), width=width)


def _check_generator(generator):
    if generator is not None:
        raise Unsupported("a torch.Generator is unsupported; remove it, and use executorch_mlx.random.seed_random_ops")


def _check_range(low, high):
    if not (isinstance(low, int) and isinstance(high, int)):
        raise Unsupported("a bound that is known only at run time is unsupported; scale torch.rand and take the floor")
    if high - low > 1 << 31:
        raise Unsupported(f"a range of {high - low} numbers is unsupported; expected at most 2^31")


# -- operators whose results have the shape of an operand ---------------------------


def _handler(target, function):
    trace = tracing_handler(target, function)

    def lower(P: Lowering, *, generator=None, **arguments):
        _check_generator(generator)
        if any(isinstance(argument, ValueSlot) for argument in arguments.values()):
            raise Unsupported("a number that is known only at run time is unsupported; make it static at export")
        if "high" in arguments:
            _check_range(arguments.get("low", 0), arguments["high"])
        return trace(P, **arguments)

    return lower


for _target, _function in FROM_TENSORS.items():
    REGISTRY.add(_target, _handler(_target, _function))


# -- operators with the shape of the result as an argument --------------------------


def _emit_words(P: Lowering, size, first=()):
    """Emit random words `[*first, *size]`, for a result of the shape `size`, which may hold value slots."""
    return P.emit(ir.RandomBitsNode, shape=[*first, *size])


@REGISTRY.lower(aten.rand.default, aten.rand.generator)
def rand(P: Lowering, size, dtype, generator=None):
    _check_generator(generator)
    return P.trace(distributions.uniform, _emit_words(P, size), P.out.dtype)[0]


@REGISTRY.lower(aten.randn.default, aten.randn.generator)
def randn(P: Lowering, size, dtype, generator=None):
    _check_generator(generator)
    return P.trace(distributions.normal, _emit_words(P, size, first=[2]), P.out.dtype)[0]


@REGISTRY.lower(aten.normal.float_float)
def normal_float_float(P: Lowering, mean, std, size, dtype, generator):
    _check_generator(generator)
    words = _emit_words(P, size, first=[2])
    return P.trace(lambda words: distributions.normal(words, P.out.dtype) * std + mean, words)[0]


@REGISTRY.lower(aten.randint.default, aten.randint.generator, aten.randint.low, aten.randint.low_generator)
def randint(P: Lowering, high, size, dtype, low=0, generator=None):
    _check_generator(generator)
    _check_range(low, high)
    return P.trace(distributions.integers, _emit_words(P, size), low, high, P.out.dtype)[0]


@REGISTRY.lower(aten.randperm.default, aten.randperm.generator)
def randperm(P: Lowering, n, dtype, generator=None):
    _check_generator(generator)
    return P.trace(distributions.permutation, _emit_words(P, [n]), P.out.dtype)[0]
