"""Composite operators: torch functions that eager execution runs and lowering traces.

`COMPOSITES` maps each operator to its torch function, which takes the operator's arguments. `mlx::sample` also has
kernels, for the IR node `SampleNode`; the other operators have none. ExecuTorch gives such folders this name.
"""

from . import layer_state, logits_processors, logprobs, sample

COMPOSITES = {**sample.COMPOSITES, **logits_processors.COMPOSITES, **logprobs.COMPOSITES, **layer_state.COMPOSITES}
