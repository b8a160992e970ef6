"""Definitions of the operators in `torch.ops.mlx`, and the packing of quantized weights.

Importing `custom_ops` defines the primitives. `custom_ops.quantized` defines the operators on packed weights and
experts, `custom_ops.official` those of ExecuTorch's own MLX delegate. Composite operators are in `custom_kernel_ops`.
"""

from . import primitives  # noqa: F401  (defines torch.ops.mlx.*)
