"""Composite operators: torch functions that eager execution runs and lowering traces.

`COMPOSITES` maps each operator to its torch function, which takes the operator's arguments. Two operators also have
kernels, for IR nodes of their own: `mlx::sample` (`SampleNode`) and `mlx::int8_quantized_matmul`
(`Int8QuantizedMatmulNode`). ExecuTorch gives such folders this name.
"""

from . import int8_activations, layer_state, logits_processors, logprobs, sample

COMPOSITES = {
    **sample.COMPOSITES,
    **logits_processors.COMPOSITES,
    **logprobs.COMPOSITES,
    **layer_state.COMPOSITES,
    **int8_activations.COMPOSITES,
}
