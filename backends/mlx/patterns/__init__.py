"""Fusions over several nodes. Importing this package registers every one of them."""

from . import attention, norm, rope  # noqa: F401
