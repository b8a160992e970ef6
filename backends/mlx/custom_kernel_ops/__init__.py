"""Composite operators: torch functions that eager execution runs and lowering traces.

`COMPOSITES` maps each operator to its function, which takes the operator's arguments.
"""

from . import penalties, sample

COMPOSITES = {**sample.COMPOSITES, **penalties.COMPOSITES}
