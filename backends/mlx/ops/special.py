"""Special functions without an IR node, decomposed in torch: lgamma, digamma, polygamma, erfcx and Bessel functions.

They are computed in float32. The polynomials are Chebyshev interpolants of the exact functions. The relative error in
float32 is below 1e-6. Near a root of a function, the absolute error is below 1e-6.
"""

from __future__ import annotations

import math

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported

aten = torch.ops.aten

# log(gamma(s + 1)) / (s * (s - 1)) as a polynomial in s - 1, for 0 <= s <= 2.
_LGAMMA = (
    0.422784336,
    -0.100317304,
    0.0329649469,
    -0.0123841154,
    0.0049994805,
    -0.00210893968,
    0.000910506364,
    -0.000401989324,
    0.000195799356,
    -9.17228251e-05,
    2.02494923e-05,
    -7.2915244e-06,
    1.93087084e-05,
    -9.67466586e-06,
)
# exp(-x) I0(x) as a polynomial in x / 4 - 1, for 0 <= x <= 8.
_I0E = (
    0.207001921,
    -0.113004327,
    0.0945156472,
    -0.089043467,
    0.0873428052,
    -0.0849628312,
    0.0792829728,
    -0.0695465913,
    0.0567272883,
    -0.0429569157,
    0.0303606371,
    -0.0197762061,
    0.0115540656,
    -0.00660461955,
    0.00416927363,
    -0.00204734501,
    0.000412651475,
    -0.000205759388,
    0.000348628412,
    -0.000136047367,
)
# sqrt(x) exp(-x) I0(x) as a polynomial in 16 / x - 1, for x >= 8.
_I0E_LARGE = (
    0.402176509,
    0.00336055224,
    0.000136217164,
    1.11398157e-05,
    1.47611573e-06,
    3.07332289e-07,
    1.08679426e-07,
    3.16198573e-08,
)
# exp(-x) I1(x) / x as a polynomial in x / 4 - 1, for 0 <= x <= 8.
_I1E = (
    0.0446877099,
    -0.061124338,
    0.0680576021,
    -0.0684826091,
    0.0637673292,
    -0.0552799757,
    0.0446755172,
    -0.0336719785,
    0.0236799437,
    -0.0155679529,
    0.00960630643,
    -0.00554539807,
    0.00295600397,
    -0.00151709161,
    0.00081240346,
    -0.000368571908,
    9.35682075e-05,
    -4.07101429e-05,
    4.75213352e-05,
    -1.7467927e-05,
)
# sqrt(x) exp(-x) I1(x) as a polynomial in 16 / x - 1, for x >= 8.
_I1E_LARGE = (
    0.389398459,
    -0.00974957746,
    -0.000219237125,
    -1.5035268e-05,
    -1.82569073e-06,
    -3.58429889e-07,
    -1.22732172e-07,
    -3.57743577e-08,
)
# exp(x^2) erfc(x) / t as a polynomial in 2 t - 1 with t = 1 / (1 + x / 2), for x >= 0.
_ERFCX = (
    0.510791353,
    0.343580341,
    0.139736033,
    0.0182211532,
    -0.0107551162,
    -0.00324000663,
    0.00154404768,
    0.000420683246,
    -0.000328100147,
    -2.23900316e-05,
    6.76878062e-05,
    -9.7766016e-06,
    -8.50886966e-06,
    2.59975569e-06,
)


def _in_float32(function):
    """Return `function` with the argument `x` cast to float32 and the result cast to the dtype that torch returns."""

    def cast(x, *rest):
        return function(x.float(), *rest).to(x.dtype if x.is_floating_point() else torch.float32)

    return cast


def _polynomial(coefficients, x):
    result = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result


# -- the gamma function ---------------------------------------------------------


def _angle(x):
    """Return pi * x minus the multiple of pi that is nearest to it."""
    return math.pi * (x - torch.round(x))


def _lgamma(x):
    positive = torch.where(x < 0, 1 - x, x)
    # Small arguments: s is x - 1, or x itself below 1, which needs gamma(x) = gamma(x + 1) / x.
    s = torch.where(positive < 1, positive, positive - 1)
    small = s * (s - 1) * _polynomial(_LGAMMA, torch.clamp(s, max=2) - 1)
    small = small - torch.where(positive < 1, torch.log(positive), 0)
    # Large arguments: Stirling's series.
    large = torch.clamp(positive, min=3)
    inverse = 1 / large
    square = inverse * inverse
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))
    # The series has the terms (x - 0.5) log(x) - x, which would be NaN at infinity. (x - 0.5) (log(x) - 1) is infinite.
    stirling = (large - 0.5) * (torch.log(large) - 1) + (0.5 * math.log(2 * math.pi) - 0.5) + series
    result = torch.where(positive < 3, small, stirling)
    # gamma(x) gamma(1 - x) = pi / sin(pi x)
    reflected = math.log(math.pi) - torch.log(torch.abs(torch.sin(_angle(x)))) - result
    reflected = torch.where(x == torch.floor(x), math.inf, reflected)
    # The results at 1 and 2 are 0.0. Without the addition, they could be -0.0.
    return torch.where(x < 0, reflected, result) + 0.0


_SHIFT = 6  # is added to arguments below 6, for which the asymptotic series below are not precise enough


def _digamma(x):
    positive = torch.where(x < 0, 1 - x, x)
    shifted = torch.where(positive < _SHIFT, positive + _SHIFT, positive)
    square = 1 / (shifted * shifted)
    series = square * (1 / 12 - square * (1 / 120 - square / 252))
    result = torch.log(shifted) - 0.5 / shifted - series
    skipped = 1 / positive + sum(1 / (positive + k) for k in range(1, _SHIFT))
    result = result - torch.where(positive < _SHIFT, skipped, 0)
    # digamma(1 - x) - digamma(x) = pi / tan(pi x)
    reflected = result - math.pi / torch.tan(_angle(x))
    reflected = torch.where(x == torch.floor(x), math.nan, reflected)
    return torch.where(x < 0, reflected, result)


def _trigamma(x):
    positive = torch.where(x < 0, 1 - x, x)
    shifted = torch.where(positive < _SHIFT, positive + _SHIFT, positive)
    inverse = 1 / shifted
    square = inverse * inverse
    result = inverse * (1 + inverse / 2 + square * (1 / 6 - square * (1 / 30 - square / 42)))
    skipped = sum(1 / (positive + k) ** 2 for k in range(_SHIFT))
    result = result + torch.where(positive < _SHIFT, skipped, 0)
    # trigamma(1 - x) + trigamma(x) = (pi / sin(pi x))^2
    sine = torch.sin(_angle(x))
    reflected = torch.where(x == torch.floor(x), math.inf, (math.pi / sine) ** 2) - result
    return torch.where(x < 0, reflected, result)


# -- Bessel functions -----------------------------------------------------------


def _scaled_bessel(magnitude, small, large):
    """Return the values of the two polynomials, with which the callers compute exp(-x) I(x).

    `small` is for x <= 8. `large` is for x >= 8, and its value is divided by sqrt(x).
    """
    near = _polynomial(small, torch.clamp(magnitude, max=8) / 4 - 1)
    far = torch.clamp(magnitude, min=8)
    return near, _polynomial(large, 16 / far - 1) / torch.sqrt(far)


def _i0e(x):
    magnitude = torch.abs(x)
    near, far = _scaled_bessel(magnitude, _I0E, _I0E_LARGE)
    return torch.where(magnitude <= 8, near, far)


def _i1e(x):
    magnitude = torch.abs(x)
    near, far = _scaled_bessel(magnitude, _I1E, _I1E_LARGE)
    result = torch.where(magnitude <= 8, near * magnitude, far)
    return torch.where(x < 0, -result, result)


def _unscaled(scaled, x):
    """Return exp(|x|) * scaled. The two factors exp(|x| / 2) do not overflow before the result does."""
    root = torch.exp(torch.abs(x) / 2)
    return scaled * root * root


def _i0(x):
    return torch.where(torch.isinf(x), math.inf, _unscaled(_i0e(x), x))


def _i1(x):
    return torch.where(torch.isinf(x), x, _unscaled(_i1e(x), x))


# -- the error function ---------------------------------------------------------


def _erfcx(x):
    t = 1 / (1 + torch.abs(x) / 2)
    result = t * _polynomial(_ERFCX, 2 * t - 1)
    return torch.where(x < 0, 2 * torch.exp(x * x) - result, result)


DECOMPOSITIONS = {
    aten.lgamma.default: _lgamma,
    aten.digamma.default: _digamma,
    aten.special_erfcx.default: _erfcx,
    aten.i0.default: _i0,
    aten.special_modified_bessel_i0.default: _i0,
    aten.special_i0e.default: _i0e,
    aten.special_i1.default: _i1,
    aten.special_modified_bessel_i1.default: _i1,
    aten.special_i1e.default: _i1e,
}

for _target, _function in DECOMPOSITIONS.items():
    REGISTRY.decompose(_target, _in_float32(_function))


@REGISTRY.lower(aten.polygamma.default)
def polygamma(P: Lowering, n, self):
    if n not in (0, 1):
        raise Unsupported(f"order {n} is unsupported; only 0 (digamma) and 1 (trigamma) are")
    return P.trace(_in_float32(_trigamma if n else _digamma), self)[0]
