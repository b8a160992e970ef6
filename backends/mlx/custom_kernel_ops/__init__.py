"""Composite operators: torch text that eager execution runs and lowering traces.

`COMPOSITES` maps each operator to its text, a function of the operator's arguments.
"""

from . import penalties, sample

COMPOSITES = {**sample.COMPOSITES, **penalties.COMPOSITES}
