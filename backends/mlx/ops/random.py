"""Lowers `mlx::random_bits` to `RandomBitsNode`, and torch's random operators to functions of random bits.

torch's operators take no seed. Each call draws from MLX's own sequence of keys, so that the numbers are not those of
torch. `executorch_mlx.random.seed_random_ops` makes them a function of a seed.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported, tracing_handler
from ..builder.slots import ValueSlot
from ..random.torch_operators import OPERATORS
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


def _handler(target, function):
    trace = tracing_handler(target, function)

    def lower(P: Lowering, *, generator=None, **arguments):
        _check_generator(generator)
        # Sizes may be known only at run time: `size`, a list, and `n` of randperm.
        if any(isinstance(argument, ValueSlot) for name, argument in arguments.items() if name != "n"):
            raise Unsupported("a number that is known only at run time is unsupported; make it static at export")
        if "high" in arguments:
            _check_range(arguments.get("low", 0), arguments["high"])
        if "dtype" in arguments:
            arguments["dtype"] = P.out.dtype
        return trace(P, **arguments)

    return lower


for _target, _function in OPERATORS.items():
    REGISTRY.add(_target, _handler(_target, _function))
