"""Layers whose weights are in MLX's packed formats.

Their parameters have the names of an mlx-lm checkpoint: `weight` (packed, as int32: see
`custom_ops.packing`), `scales` and `biases`. `bias` is that of the layer. All are frozen.
"""

from __future__ import annotations

import torch

from ...custom_ops import quantized
from ...custom_ops.packing import check, dequantize


class Packed(torch.nn.Module):
    """The operands of MLX's quantized operators: see `custom_ops.packing`.

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
        """The arguments of the operators in `custom_ops.quantized`, in their order."""
        return self.weight, self.scales, self.biases, self.group_size, self.bits, self.mode

    def dequantized(self) -> torch.Tensor:
        """The weight as float32."""
        return dequantize(*self.operands())

    def extra_repr(self) -> str:
        shape = [*self.weight.shape[:-1], self.weight.shape[-1] * 32 // self.bits]
        return f"{shape}, bits={self.bits}, group_size={self.group_size}, mode={self.mode}"


class MLXLinear(Packed):
    """A linear layer `[..., K]` → `[..., N]` with weight [N, K]. The product is scaled by `factor`."""

    def __init__(
        self,
        *operands,
        bias: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        **quantization,
    ):
        super().__init__(*operands, **quantization)
        self.bias = _frozen(bias)
        self.factor = None if factor is None else float(factor)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1] * 32 // self.bits

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = quantized.quantized_matmul(x, *self.operands())
        if self.factor is not None:
            y = y * self.factor
        return y if self.bias is None else y + self.bias


class MLXEmbedding(Packed):
    """An embedding, indices `[...]` → `[..., K]`, scaled by `scale`.

    The result has the dtype of the scales, or `dtype` (by default float32) if the scales are bytes.
    """

    def __init__(
        self,
        *operands,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
        **quantization,
    ):
        super().__init__(*operands, **quantization)
        if dtype is None:
            dtype = self.scales.dtype if self.scales.is_floating_point() else torch.float32
        # A buffer, so that `.to(dtype)` also changes the dtype of the result.
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
        rows = quantized.quantized_embedding(indices, *self.operands(), dtype)
        return rows * self.scale if self.scaled else rows


class MLXExperts(Packed):
    """Products with the weights [E, N, K] of a mixture of experts.

    `x` `[..., M, K]`, `index` `[...]` → `[..., M, N]`: each matrix is multiplied by the weight [N, K]
    that its index selects. The batch axes broadcast.
    """

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return quantized.gathered_quantized_matmul(x, index, *self.operands())


# Replacing layers -----------------------------------------------------------------------


def is_experts(module: torch.nn.Module) -> bool:
    """Whether `module` uses the experts interface of `transformers`.

    Its weights are stacked in `down_proj` and in `gate_up_proj`, or `up_proj` without a gate.
    """
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "down_proj"))


def is_linear(module: torch.nn.Module) -> bool:
    """Whether `module` is a linear layer with PyTorch's own forward."""
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def is_embedding(module: torch.nn.Module) -> bool:
    """Whether `module` is a plain embedding, or one of `transformers` that scales its result."""
    plain = type(module).forward is torch.nn.Embedding.forward
    return isinstance(module, torch.nn.Embedding) and (plain or hasattr(module, "scalar_embed_scale"))


def packable(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of the weights of `module` that `install` can replace.

    Groups run along their last axis, or along the second to last if `module.is_transposed`.
    """
    if is_linear(module) or is_embedding(module):
        return ("weight",)
    if is_experts(module):
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        return tuple(n for n in names if isinstance(getattr(module, n), torch.Tensor))
    return ()


def install(model: torch.nn.Module, path: str, name: str, *operands, **quantization) -> Packed:
    """Replace the weight `name` of the layer at `path`, one of its `packable` weights, in place.

    `operands` and `quantization` are the arguments of `Packed`. Returns the new layer.
    """
    module = model.get_submodule(path)
    if is_experts(module):
        delattr(module, name)
        packed = MLXExperts(*operands, **quantization)
        module.add_module(name, packed)
        return packed
    if is_embedding(module):
        scale = getattr(module, "scalar_embed_scale", None)
        packed = MLXEmbedding(*operands, scale=scale, **quantization)
    else:
        packed = MLXLinear(*operands, bias=module.bias, **quantization)
    model.set_submodule(path, packed)
    return packed


def _frozen(t: torch.Tensor | None) -> torch.nn.Parameter | None:
    if t is None or isinstance(t, torch.nn.Parameter):
        return t
    return torch.nn.Parameter(t, requires_grad=False)
