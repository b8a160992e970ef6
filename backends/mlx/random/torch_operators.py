"""torch's random operators in terms of the functions of this package, without a seed."""

from __future__ import annotations

import math

import torch

from . import distributions
from .functions import bernoulli, dropout_and_mask, multinomial, rand, randint, randn, random_words, randperm

aten = torch.ops.aten

# The functions take the arguments of the operators. `**_` takes those for the device, the layout and the generator. The
# generator must be None.


def _rand(size, *, dtype=None, **_):
    return rand(size, dtype=dtype or torch.get_default_dtype())


def _rand_like(x, *, dtype=None, **_):
    return rand(x.shape, dtype=dtype or x.dtype)


def _randn(size, *, dtype=None, **_):
    return randn(size, dtype=dtype or torch.get_default_dtype())


def _randn_like(x, *, dtype=None, **_):
    return randn(x.shape, dtype=dtype or x.dtype)


def _randint(high, size, *, dtype=None, **_):
    return randint(0, high, size, dtype=dtype or torch.int64)


def _randint_low(low, high, size, *, dtype=None, **_):
    return randint(low, high, size, dtype=dtype or torch.int64)


def _randint_like(x, high, *, dtype=None, **_):
    return randint(0, high, x.shape, dtype=dtype or x.dtype)


def _randint_like_low(x, low, high, *, dtype=None, **_):
    return randint(low, high, x.shape, dtype=dtype or x.dtype)


def _random_to(x, to, **_):
    return randint(0, to, x.shape, dtype=x.dtype)


def _randperm(n, *, dtype=None, **_):
    return randperm(n, dtype=dtype or torch.int64)


def _bernoulli(p, **_):
    return bernoulli(p)


def _bernoulli_p(x, p=0.5, **_):
    return (rand(x.shape) < p).to(x.dtype)


def _uniform(x, low=0.0, high=1.0, **_):
    drawn = (rand(x.shape, dtype=x.dtype).to(torch.float32) * (high - low) + low).to(x.dtype)
    if not (isinstance(high, float) and low < high):
        return drawn
    return drawn.clamp(max=distributions.largest_below(high, x.dtype))  # rounding may have reached `high`


def _normal_functional(x, mean=0.0, std=1.0, **_):
    return (randn(x.shape) * std + mean).to(x.dtype)


def _normal_tensor_float(mean, std=1.0, **_):
    return _normal_functional(mean, mean, std)


def _normal_float_tensor(mean, std, **_):
    return _normal_functional(std, mean, std)


def _normal_tensor_tensor(mean, std, **_):
    return _normal_functional(mean + std, mean, std)


def _normal_float_float(mean, std, size, *, dtype=None, **_):
    return _randn(size, dtype=dtype) * std + mean


def _log_normal(x, mean=1.0, std=2.0, **_):
    return torch.exp(randn(x.shape) * std + mean).to(x.dtype)


def _exponential_times(x):
    return distributions.exponential(random_words(x.shape, None))


def _exponential(x, rate=1.0, **_):
    return (_exponential_times(x) / rate).to(x.dtype)


def _geometric(x, p, **_):
    return torch.ceil(_exponential_times(x) / -math.log1p(-p)).clamp(min=1).to(x.dtype)


def _cauchy(x, median=0.0, sigma=1.0, **_):
    return (torch.tan(math.pi * (rand(x.shape) - 0.5)) * sigma + median).to(x.dtype)


def _multinomial(weights, num_samples, replacement=False, **_):
    return multinomial(weights, num_samples, replacement)


def _native_dropout(x, p, train):
    if train is False:  # None means True
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    return dropout_and_mask(x, p)


def _dropout(x, p, train):
    return dropout_and_mask(x, p)[0] if train else x


OPERATORS = {
    aten.rand_like.default: _rand_like,
    aten.rand_like.generator: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.randn_like.generator: _randn_like,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.random.to: _random_to,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli.Tensor: _bernoulli_p,
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _normal_functional,
    aten.normal.Tensor_float: _normal_tensor_float,
    aten.normal.float_Tensor: _normal_float_tensor,
    aten.normal.Tensor_Tensor: _normal_tensor_tensor,
    aten.log_normal.default: _log_normal,
    aten.exponential.default: _exponential,
    aten.geometric.default: _geometric,
    aten.cauchy.default: _cauchy,
    aten.multinomial.default: _multinomial,
    aten.native_dropout.default: _native_dropout,
    aten.rand.default: _rand,
    aten.rand.generator: _rand,
    aten.randn.default: _randn,
    aten.randn.generator: _randn,
    aten.randint.default: _randint,
    aten.randint.generator: _randint,
    aten.randint.low: _randint_low,
    aten.randint.low_generator: _randint_low,
    aten.randperm.default: _randperm,
    aten.randperm.generator: _randperm,
    aten.normal.float_float: _normal_float_float,
}

DECOMPOSITIONS = {**OPERATORS, aten.dropout.default: _dropout}
