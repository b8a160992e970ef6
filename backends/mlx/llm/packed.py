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
        self.weight = _frozen(weight if weight.dtype == torch.int32 else weight.view(torch.int32))
        self.scales = _frozen(scales)
        self.biases = _frozen(biases)
        self.group_size, self.bits, self.mode = group_size, bits, mode

    def operands(self) -> tuple:
        """What the operators of `custom_quant_ops` take, in their order."""
        return self.weight, self.scales, self.biases, self.group_size, self.bits, self.mode

    def dequantized(self) -> torch.Tensor:
        """The weight as float32."""
        return dequantize(*self.operands())

    def extra_repr(self) -> str:
        shape = [*self.weight.shape[:-1], self.weight.shape[-1] * 32 // self.bits]
        return f"{shape}, bits={self.bits}, group_size={self.group_size}, mode={self.mode}"


class MLXLinear(Packed):
    """`[..., K]` → `[..., N]`, with a weight [N, K] times the number `factor`, if there is one."""

    def __init__(
        self,
        *operands,
        bias: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        **form,
    ):
        super().__init__(*operands, **form)
        self.bias = _frozen(bias)
        self.factor = None if factor is None else float(factor)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1] * 32 // self.bits

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = custom_quant_ops.quantized_matmul(x, *self.operands())
        if self.factor is not None:
            y = y * self.factor
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
        # Its dtype is that of the rows, and follows a `.to()`.
        factor = torch.tensor(1.0 if scale is None else scale, dtype=dtype)
        self.register_buffer("scale", factor, persistent=False)
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


# What can be replaced -------------------------------------------------------------------


def is_experts(module: torch.nn.Module) -> bool:
    """Whether `module` is one of those whose text `transformers` lets others replace: its weights
    are stacked in `down_proj` and `gate_up_proj`, or `up_proj` where there is no gate."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "down_proj"))


def is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def is_embedding(module: torch.nn.Module) -> bool:
    """Plain ones, and those of `transformers` that scale their rows."""
    plain = type(module).forward is torch.nn.Embedding.forward
    return isinstance(module, torch.nn.Embedding) and (plain or hasattr(module, "scalar_embed_scale"))


def packable(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of the weights that `install` can replace; their rows are the last axis, or the
    last but one where `module.is_transposed`."""
    if is_linear(module) or is_embedding(module):
        return ("weight",)
    if is_experts(module):
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        return tuple(n for n in names if isinstance(getattr(module, n), torch.Tensor))
    return ()


def install(model: torch.nn.Module, path: str, name: str, *operands, **form) -> Packed:
    """Put packed operands in the place of one of the `packable` weights; returns their layer."""
    module = model.get_submodule(path)
    if is_experts(module):
        delattr(module, name)
        packed = MLXExperts(*operands, **form)
        module.add_module(name, packed)
        return packed
    if is_embedding(module):
        scale = getattr(module, "scalar_embed_scale", None)
        packed = MLXEmbedding(*operands, scale=scale, **form)
    else:
        packed = MLXLinear(*operands, bias=module.bias, **form)
    model.set_submodule(path, packed)
    return packed


def _frozen(t: torch.Tensor | None) -> torch.nn.Parameter | None:
    if t is None or isinstance(t, torch.nn.Parameter):
        return t
    return torch.nn.Parameter(t, requires_grad=False)
