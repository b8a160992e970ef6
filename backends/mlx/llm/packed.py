"""Layers whose weights are in MLX's packings.

Their parameters have the names of an MLX folder: `weight` (packed, int32 here: see
`packing`), `scales`, `biases`; `bias` is the layer's own. All are frozen.
"""

from __future__ import annotations

import torch

from .. import custom_quant_ops
from ..packing import check, dequantize


class Packed(torch.nn.Module):
    """Operands of MLX's quantized instructions: see `packing`.

    Raises ValueError if they do not fit each other.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scales: torch.Tensor,
        biases: torch.Tensor | None = None,
        *,
        group_size: int,
        bits: int,
        mode: str = "affine",
    ):
        super().__init__()
        check(weight, scales, biases, group_size, bits, mode)
        self.weight = _frozen(weight.view(torch.int32))
        self.scales = _frozen(scales)
        self.biases = _frozen(biases)
        self.group_size, self.bits, self.mode = group_size, bits, mode

    def operands(self) -> tuple:
        """What the operators of `custom_quant_ops` take, in their order."""
        return self.weight, self.scales, self.biases, self.group_size, self.bits, self.mode

    def tie(self, other: Packed) -> None:
        """Have the very parameters of `other`."""
        self.weight, self.scales, self.biases = other.weight, other.scales, other.biases
        self.group_size, self.bits, self.mode = other.group_size, other.bits, other.mode

    def dequantized(self) -> torch.Tensor:
        """The weight as float32."""
        return dequantize(*self.operands())

    def extra_repr(self) -> str:
        shape = [*self.weight.shape[:-1], self.weight.shape[-1] * 32 // self.bits]
        return f"{shape}, bits={self.bits}, group_size={self.group_size}, mode={self.mode}"


class MLXLinear(Packed):
    """`[..., K]` → `[..., N]`, with a weight [N, K]."""

    def __init__(self, *operands, bias: torch.Tensor | None = None, **form):
        super().__init__(*operands, **form)
        self.bias = _frozen(bias)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1] * 32 // self.bits

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = custom_quant_ops.quantized_matmul(x, *self.operands())
        return y if self.bias is None else y + self.bias


class MLXEmbedding(Packed):
    """Indices `[...]` → rows `[..., K]` of the dtype of the scales, or of `dtype` where the scales
    are bytes, times `scale`."""

    def __init__(
        self,
        *operands,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
        **form,
    ):
        super().__init__(*operands, **form)
        if dtype is None:
            dtype = self.scales.dtype if self.scales.is_floating_point() else torch.float32
        # A tensor of the dtype of the rows, which `.to()` keeps right.
        self.register_buffer("scale", torch.tensor(1.0 if scale is None else scale, dtype=dtype), persistent=False)
        self.scaled = scale is not None

    @property
    def num_embeddings(self) -> int:
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.weight.shape[1] * 32 // self.bits

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        dtype = self.scale.dtype
        rows = custom_quant_ops.quantized_embedding(indices, *self.operands(), dtype)
        return rows * self.scale if self.scaled else rows


class MLXExperts(Packed):
    """`x` `[..., M, K]`, `index` `[...]`: each matrix times the weight [N, K] that its index chooses
    out of [E, N, K]; the batch axes broadcast → `[..., M, N]`."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return custom_quant_ops.gathered_quantized_matmul(x, index, *self.operands())


def _frozen(t: torch.Tensor | None) -> torch.nn.Parameter | None:
    if t is None or isinstance(t, torch.nn.Parameter):
        return t
    return torch.nn.Parameter(t, requires_grad=False)
