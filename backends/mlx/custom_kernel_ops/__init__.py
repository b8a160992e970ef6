"""Composite operators: torch functions that eager execution runs and lowering traces.

`COMPOSITES` maps each operator to its torch function, which takes the operator's arguments. With extensions, three of
the operators become IR nodes of their own, for which the runtime has kernels: `mlx::sample` (`SampleNode`),
`mlx::mask_logits` (`MaskLogitsNode`) and `mlx::int8_quantized_matmul` (`Int8QuantizedMatmulNode`). The module
`recurrence` defines operators that become loops; they are not in `COMPOSITES`. The name of the folder is taken from
ExecuTorch; the folder contains no kernels.
"""

from collections.abc import Callable
from typing import Any

from . import int8_activations, layer_state, logits_processors, logprobs, recurrence, sample  # noqa: F401

COMPOSITES: dict[Any, Callable] = {
    **sample.COMPOSITES,
    **logits_processors.COMPOSITES,
    **logprobs.COMPOSITES,
    **layer_state.COMPOSITES,
    **int8_activations.COMPOSITES,
}
