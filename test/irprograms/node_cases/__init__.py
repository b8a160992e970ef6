"""The cases of all IR nodes that a `NodeCase` can test."""

from . import elementwise, index, nn, reduce, shape

CASES = [case for family in (elementwise, index, nn, reduce, shape) for case in family.CASES]
