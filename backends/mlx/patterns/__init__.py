"""Fusions: patterns that lower several FX nodes together. Importing this package registers all of them."""

from . import attention, gelu, linear, norm, quant, rope, scatter  # noqa: F401
