"""Lowers `mlx::random_bits` to `RandomBitsNode`, and torch's random operators to functions of random bits.

torch's operators take no seed. Each call draws from MLX's own sequence of keys, so that the numbers are not those of
torch. A `torch.Generator` is declined: its state is not an input of the program.
"""

from __future__ import annotations

import math

import torch

from ..builder.registry import REGISTRY, Unsupported
from ..serialization import ir

aten = torch.ops.aten


@REGISTRY.lower(torch.ops.mlx.random_bits.default)
def random_bits(P, shape, seed=None, width=4):
    return P.emit(
        ir.RandomBitsNode,
        shape=shape,
        seed=None if seed is None else P.item(seed),
        width=width,
        dtype=P.out.dtype,
    )


# -- distributions --------------------------------------------------------------

# The random bits of a uniform number in [0, 1): as many as the significand of the dtype has, so that no number rounds
# to 1.
_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _words(shape):
    return torch.ops.mlx.random_bits(shape)


def _uniform(words, dtype):
    """Returns numbers in [0, 1), one for each random word."""
    bits = _BITS[dtype]
    return (torch.floor_divide(words.to(torch.int64), 1 << 32 - bits).float() * 2.0**-bits).to(dtype)


def _exponential(words):
    """Returns exponentially distributed float32 numbers, none of which is 0."""
    return -torch.log((words.to(torch.float32) + 0.5).clamp(max=2.0**32 - 256) * 2.0**-32)


def _normal(words, more_words, dtype):
    """Returns normally distributed numbers, by the Box-Muller transform."""
    radius = torch.sqrt(2 * _exponential(words))
    return (radius * torch.cos(2 * math.pi * _uniform(more_words, torch.float32))).to(dtype)


def _integers(words, low, high, dtype):
    """Returns integers in [low, high). Their probabilities differ by at most 2^-32."""
    if not (isinstance(low, int) and isinstance(high, int)):
        raise Unsupported("a bound that is known only at run time is unsupported; scale torch.rand and take the floor")
    if high - low > 1 << 31:
        raise Unsupported(f"a range of {high - low} numbers is unsupported; expected at most 2^31")
    return (torch.floor_divide(words.to(torch.int64) * (high - low), 1 << 32) + low).to(dtype)


def _normal_like(x):
    return _normal(_words(x.shape), _words(x.shape), x.dtype)


def _bernoulli(probability):
    return (_uniform(_words(probability.shape), torch.float32) < probability).to(probability.dtype)


def _multinomial(weights, count, replacement):
    """Draws indices with probabilities proportional to `weights` [..., V], as an exponential race.

    The index with the smallest exponential time divided by its weight wins. Without replacement, the first `count`
    indices of one race are drawn.
    """
    weights = weights.float()
    if replacement and count > 1:
        weights = weights.unsqueeze(-2).expand(*weights.shape[:-1], count, weights.shape[-1])
        return (weights / _exponential(_words(weights.shape))).argmax(-1)
    return torch.topk(weights / _exponential(_words(weights.shape)), count).indices


# -- operators ------------------------------------------------------------------


def _check(generator, dtype):
    if generator is not None:
        raise Unsupported("a torch.Generator is unsupported; use torch.ops.mlx.random_bits(shape, seed)")
    if dtype.is_floating_point and dtype not in _BITS:
        raise Unsupported(f"{dtype} is unsupported; use float32")


def _emit_words(P, size):
    """Emits random words of the shape `size`, which may hold value slots, for a result with this shape."""
    words = P.emit(ir.RandomBitsNode, shape=size, dtype=torch.uint32)
    words.shape = tuple(P.out.shape)
    return words


@REGISTRY.lower(aten.rand.default)
def rand(P, size, dtype):
    _check(None, P.out.dtype)
    return P.trace(_uniform, _emit_words(P, size), P.out.dtype)[0]


@REGISTRY.lower(aten.rand_like.default)
def rand_like(P, self, dtype):
    _check(None, P.out.dtype)
    return P.trace(lambda x: _uniform(_words(x.shape), P.out.dtype), self)[0]


@REGISTRY.lower(aten.randn.default)
def randn(P, size, dtype):
    _check(None, P.out.dtype)
    return P.trace(_normal, _emit_words(P, size), _emit_words(P, size), P.out.dtype)[0]


@REGISTRY.lower(aten.randn_like.default)
def randn_like(P, self, dtype):
    _check(None, P.out.dtype)
    return P.trace(lambda x: _normal(_words(x.shape), _words(x.shape), P.out.dtype), self)[0]


@REGISTRY.lower(aten.randint.default, aten.randint.low)
def randint(P, high, size, dtype, low=0):
    return P.trace(_integers, _emit_words(P, size), low, high, P.out.dtype)[0]


@REGISTRY.lower(aten.randint_like.default, aten.randint_like.low_dtype)
def randint_like(P, self, high, dtype, low=0):
    return P.trace(lambda x: _integers(_words(x.shape), low, high, P.out.dtype), self)[0]


@REGISTRY.lower(aten.randperm.default)
def randperm(P, n, dtype):
    return P.trace(lambda w: torch.argsort(w.to(torch.int64)).to(P.out.dtype), _emit_words(P, [n]))[0]


@REGISTRY.lower(aten.bernoulli.default)
def bernoulli(P, self, generator):
    _check(generator, self.dtype)
    return P.trace(_bernoulli, self)[0]


@REGISTRY.lower(aten.bernoulli.p)
def bernoulli_p(P, self, p, generator):
    _check(generator, self.dtype)
    return P.trace(lambda x: _bernoulli(torch.full_like(x, p)), self)[0]


@REGISTRY.lower(aten.normal.Tensor_float)
def normal_tensor_float(P, mean, std, generator):
    _check(generator, mean.dtype)
    return P.trace(lambda m: _normal_like(m) * std + m, mean)[0]


@REGISTRY.lower(aten.normal.float_Tensor)
def normal_float_tensor(P, mean, std, generator):
    _check(generator, std.dtype)
    return P.trace(lambda s: _normal_like(s) * s + mean, std)[0]


@REGISTRY.lower(aten.normal.Tensor_Tensor)
def normal_tensor_tensor(P, mean, std, generator):
    _check(generator, mean.dtype)
    return P.trace(lambda m, s: _normal_like(m + s) * s + m, mean, std)[0]


@REGISTRY.lower(aten.exponential.default)
def exponential(P, self, lambd, generator):
    _check(generator, self.dtype)
    return P.trace(lambda x: (_exponential(_words(x.shape)) / lambd).to(x.dtype), self)[0]


@REGISTRY.lower(aten.multinomial.default)
def multinomial(P, self, num_samples, replacement, generator):
    _check(generator, self.dtype)
    return P.trace(_multinomial, self, num_samples, replacement)[0]


@REGISTRY.lower(aten.native_dropout.default)
def native_dropout(P, input, p, train):
    """Lowers dropout in training mode, as in Monte Carlo dropout."""
    if not train:
        return P.trace(lambda x: [x.clone(), torch.ones_like(x, dtype=torch.bool)], input)
    return P.trace(_dropout, input, p)


def _dropout(x, p):
    kept = _uniform(_words(x.shape), torch.float32) >= p
    scale = 1 / (1 - p) if p < 1 else 0.0
    return [x * kept * scale, kept]
