"""Composite operators: torch functions that eager execution runs and lowering traces.

`mlx::sample` also has kernels, for the IR node `SampleNode`. The other operators have none. The folder has the name that ExecuTorch gives to such a folder. `COMPOSITES` maps each
operator to its torch function, which takes the operator's arguments.
"""

from . import logprobs, penalties, sample

COMPOSITES = {**sample.COMPOSITES, **penalties.COMPOSITES, **logprobs.COMPOSITES}
