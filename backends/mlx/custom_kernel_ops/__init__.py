"""Composite operators: torch text that eager execution runs and lowering traces.

`COMPOSITES` maps each operator to its text, a function of the operator's arguments.
"""

from . import random_bits_at, sample

COMPOSITES = {**random_bits_at.COMPOSITES, **sample.COMPOSITES}
