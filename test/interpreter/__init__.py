"""An interpreter of the MLX IR in Python, over `mlx.core`: an executable form of what a runtime does with a program.

    program = Program(pte, OFFICIAL)            # as ExecuTorch's own MLX delegate takes it
    outputs = program.execute("forward", [x])   # raises Refused where that delegate returns an error

With `OURS` in place of `OFFICIAL`, it takes the program as this project's runtime does, and is a second opinion on that
runtime. `nodes.py` has a line for each IR node, and `meaning.py` everything in which the two differ.
"""

from .meaning import Meaning, Refused, Undefined  # noqa: F401
from .meanings import OFFICIAL, OURS  # noqa: F401
from .program import Program  # noqa: F401
