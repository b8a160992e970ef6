"""Definitions of the operators in `torch.ops.mlx`, and the packing of quantized weights.

Importing `custom_ops` defines the operators of `custom_ops.primitives`, `custom_ops.quantized_cache`,
`custom_ops.recurrent_layers` and `custom_ops.training`. The other modules define their operators when they are
imported: `custom_ops.quantized` those on packed weights and on experts, and `custom_ops.official` those of ExecuTorch's
own MLX delegate. Composite operators are defined in `custom_kernel_ops`.
"""

from . import primitives, quantized_cache, recurrent_layers, training  # noqa: F401  (defines torch.ops.mlx.*)
