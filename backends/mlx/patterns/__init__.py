"""Fusions over several nodes. Importing this package registers every one of them."""

from . import attention, gelu, linear, norm, quant, rope  # noqa: F401
