"""Rewrites the bounds of numbers in JSON schemas to a form that xgrammar follows.

As bounds of integers, xgrammar takes only integers of 64 bits. It writes a number with bounds with at most six
decimals, and admits an empty text if no such number lies within them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge, "exclusiveMinimum": operator.gt, "maximum": operator.le, "exclusiveMaximum": operator.lt,
}  # fmt: skip
DECIMALS = 6
LOWEST, HIGHEST = 1 - 2**63, 2**63 - 2  # xgrammar takes the numbers beside them for no bounds


def with_followed_bounds(schema: dict[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """Return a schema whose values have one of `types`, with bounds that xgrammar follows.

    It admits only values that `schema` admits. Raises ValueError if no number lies within the bounds.
    """
    if not BOUNDS.keys() & schema.keys():
        return schema
    if "number" in types:
        low, high = _steps(schema, Fraction(1, 10**DECIMALS))
        if low > high:
            raise ValueError(f"no number with at most {DECIMALS} decimals lies within the bounds")
    elif "integer" in types:
        low, high = _steps(schema, Fraction(1))
        limits = {"minimum": max(low, LOWEST)} if low > -math.inf else {}
        limits |= {"maximum": min(high, HIGHEST)} if high < math.inf else {}
        if limits.get("minimum", LOWEST) > limits.get("maximum", HIGHEST):
            raise ValueError("no integer of 64 bits lies within the bounds")
        return {key: value for key, value in schema.items() if key not in BOUNDS} | limits
    return schema


def _steps(schema: dict[str, Any], step: Fraction) -> tuple[float, float]:
    """Return the numbers of steps from 0 to the lowest and to the highest multiple of `step` within the bounds."""
    low, high = -math.inf, math.inf
    for key in BOUNDS.keys() & schema.keys():
        steps = Fraction(str(schema[key])) / step  # by its digits, which xgrammar compares
        if key == "minimum":
            low = max(low, math.ceil(steps))
        elif key == "exclusiveMinimum":
            low = max(low, math.floor(steps) + 1)
        elif key == "maximum":
            high = min(high, math.floor(steps))
        else:
            high = min(high, math.ceil(steps) - 1)
    return low, high
