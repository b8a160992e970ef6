"""Definitions of the operators in `torch.ops.mlx`, and the packing of quantized weights.

Importing `custom_ops` defines the operators of `custom_ops.primitives` and `custom_ops.quantized_cache`. `custom_ops.quantized` defines the operators on
packed weights and on experts. `custom_ops.official` defines the operators of ExecuTorch's own MLX delegate. Composite
operators are defined in `custom_kernel_ops`.
"""

from . import primitives, quantized_cache  # noqa: F401  (defines torch.ops.mlx.*)
