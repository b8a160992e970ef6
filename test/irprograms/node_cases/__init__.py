"""The cases of all nodes that one case can test."""

from . import elementwise, index, nn, reduce, shape

CASES = [case for family in (elementwise, index, nn, reduce, shape) for case in family.CASES]
