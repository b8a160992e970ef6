"""Layers whose weights are in MLX's packed formats.

The parameters of these layers have the names in an mlx-lm checkpoint: `weight`, `scales` and `biases` are
the packed weight, which `custom_ops.packing` explains; `weight` is int32. `bias` is the bias of a linear
layer. All parameters are frozen. The attribute `weight` is not the parameter of this name, but what the code of a model
expects there: the weight as a floating-point tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.pytorch_utils import Conv1D

from ...custom_kernel_ops import int8_activations
from ...custom_ops import quantized
from ...custom_ops.packing import check, dequantize

OPERANDS = ("weight", "scales", "biases")


class Packed(torch.nn.Module):
    """A layer with one packed weight. `custom_ops.packing` explains the arguments of the constructor but `dtype`.

    `dtype` is the dtype in which the model computes; by default the dtype of the scales, or float32 if the scales are
    uint8. Raises ValueError unless the arguments describe a packed tensor.
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
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check(weight, scales, biases, group_size, bits, mode)
        # Not `register_parameter`, which refuses the name of a property.
        self._parameters["weight"] = _frozen(weight if weight.dtype == torch.int32 else weight.view(torch.int32))
        self.scales = _frozen(scales)
        self.biases = _frozen(biases)
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.dtype = dtype or (scales.dtype if scales.is_floating_point() else torch.float32)

    @property
    def words(self) -> torch.nn.Parameter:
        """The packed integers, int32."""
        return self._parameters["weight"]

    @property
    def weight(self) -> torch.Tensor:
        """The weight [N, K] of a linear layer or an embedding, dequantized to `dtype`.

        Some models read its dtype or its shape, or multiply by it. In a traced graph, it is one operator, which is
        removed if only its dtype or shape is needed.
        """
        rows = torch.arange(self.words.shape[0], device=self.words.device)
        return quantized.quantized_embedding(rows, *self.packed_arguments(), self.dtype)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Set the dtype in which the model computes."""
        self.dtype = dtype

    def packed_arguments(self) -> tuple:
        """Return the arguments that the operators in `custom_ops.quantized` take for a packed weight, in order."""
        return self.words, self.scales, self.biases, self.group_size, self.bits, self.mode

    def dequantized(self) -> torch.Tensor:
        """Return the weight, dequantized to float32."""
        return dequantize(*self.packed_arguments())

    def extra_repr(self) -> str:
        shape = [*self.words.shape[:-1], self.words.shape[-1] * 32 // self.bits]
        return f"{shape}, bits={self.bits}, group_size={self.group_size}, mode={self.mode}"


class MLXLinear(Packed):
    """A linear layer `[..., K]` → `[..., N]` with a packed weight [N, K].

    If `factor` is not None, the product with the weight is multiplied by it before the bias is added. If
    `int8_activations` is set, which `can_use_int8_activations` permits, the input is rounded to 8 bits.
    """

    def __init__(self, *operands, bias: torch.Tensor | None = None, factor: torch.Tensor | None = None, **quantization):
        super().__init__(*operands, **quantization)
        self.bias = _frozen(bias)
        self.factor = None if factor is None else float(factor)
        self.int8_activations = False

    @property
    def weight(self) -> torch.Tensor:
        weight = super().weight
        return weight if self.factor is None else weight * self.factor

    @property
    def in_features(self) -> int:
        return self.words.shape[1] * 32 // self.bits

    @property
    def out_features(self) -> int:
        return self.words.shape[0]

    @property
    def can_use_int8_activations(self) -> bool:
        return self.mode == "affine" and self.bits in int8_activations.BITS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._product(x)
        return y if self.bias is None else y + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.int8_activations:
            return int8_activations.int8_quantized_matmul(x, *self.packed_arguments()[:-1])
        if self.factor is None:
            return quantized.quantized_matmul(x, *self.packed_arguments())
        # The product without the factor may be beyond the range of float16.
        wide = x.float() if x.dtype == torch.float16 else x
        return (quantized.quantized_matmul(wide, *self.packed_arguments()) * self.factor).to(x.dtype)


class MLXEmbedding(Packed):
    """An embedding with a packed weight, indices `[...]` → `[..., K]`.

    The result is multiplied by `factor`, by default 1. It has the dtype of the layer.
    """

    def __init__(self, *operands, factor: float | None = None, **quantization):
        super().__init__(*operands, **quantization)
        self.exact_factor = factor
        # The dtype of the factor is the dtype of the result. The factor is a buffer, so that `.to(dtype)` changes it.
        self.register_buffer("factor", torch.ones(()), persistent=False)
        self.compute_in(self.dtype)

    @property
    def num_embeddings(self) -> int:
        return self.words.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.words.shape[1] * 32 // self.bits

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        rows = quantized.quantized_embedding(indices, *self.packed_arguments(), self.factor.dtype)
        return rows if self.exact_factor is None else rows * self.factor

    def compute_in(self, dtype: torch.dtype) -> None:
        super().compute_in(dtype)
        # Not cast from the old factor, which may be rounded to the dtype of the scales.
        factor = 1.0 if self.exact_factor is None else self.exact_factor
        self.factor = torch.tensor(factor, dtype=dtype, device=self.factor.device)  # type: ignore[has-type]


class MLXExperts(Packed):
    """The packed weights [E, N, K] of the E experts of a mixture.

    `x` `[..., M, K]`, `index` `[...]` → `[..., M, N]`: each matrix [M, K] of `x` is multiplied by the
    transpose of the weight [N, K] that the element of `index` selects. The batch axes of `x` and `index`
    broadcast.
    """

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return quantized.gathered_quantized_matmul(x, index, *self.packed_arguments())


def gathered_product(x: torch.Tensor, weight: torch.Tensor | MLXExperts, index: torch.Tensor) -> torch.Tensor:
    """Multiply `x` by the transposes of weights [E, N, K], which may be packed, as `MLXExperts` does."""
    return weight(x, index) if isinstance(weight, MLXExperts) else quantized.gathered_matmul(x, weight, index)


def set_int8_activations(model: torch.nn.Module, enabled: bool) -> int:
    """Set whether the packed linear layers of `model` round their inputs to 8 bits. Return the number of layers set.

    Layers in a format without integers, such as `mxfp4`, and experts always keep float activations.
    """
    layers = [m for m in model.modules() if isinstance(m, MLXLinear) and m.can_use_int8_activations]
    for layer in layers:
        layer.int8_activations = enabled
    return len(layers)


@contextmanager
def arbitrary_products(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, the packed linear layers of `model` multiply by a matrix of their own choice, in no time.

    It is for a run that finds out what a model does with any weights. The first column of the matrix has different
    elements, and the other columns are zero.
    """
    layers = [module for module in model.modules() if isinstance(module, MLXLinear)]
    for layer in layers:
        layer.forward = functools.partial(_arbitrary_product, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # that of the class remains


def _arbitrary_product(layer: MLXLinear, x: torch.Tensor) -> torch.Tensor:
    y = x[..., :1] * torch.arange(layer.out_features, device=x.device).cos().to(x.dtype)
    return y if layer.bias is None else y + layer.bias


# Replacing layers -----------------------------------------------------------------------


def is_experts(module: torch.nn.Module) -> bool:
    """Whether `module` uses the experts interface of `transformers`.

    The weights of such a module are stacked in `down_proj` and in `gate_up_proj`, or in `up_proj` if the
    experts have no gate.
    """
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "down_proj"))


def is_linear(module: torch.nn.Module) -> bool:
    """Whether `module` is a linear layer with PyTorch's own forward."""
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def use_linear_layers(model: torch.nn.Module) -> None:
    """Replace each Conv1D of transformers, as in GPT-2, in place by the linear layer that computes the same."""
    for path, module in list(model.named_modules()):
        if type(module) is Conv1D:
            use_linear_layer(model, path)


def use_linear_layer(model: torch.nn.Module, path: str) -> torch.nn.Linear:
    """Replace the Conv1D of transformers at `path`, in place, by a linear layer. Return that layer."""
    conv = model.get_submodule(path)
    layer = torch.nn.Linear(*conv.weight.shape, bias=False, device="meta")
    layer.weight = _frozen(conv.weight.data.T.contiguous())
    layer.bias = conv.bias
    model.set_submodule(path, layer)
    return layer


def is_embedding(module: torch.nn.Module) -> bool:
    """Whether `module` is a plain embedding, or one of `transformers` that multiplies its result by a factor."""
    plain = type(module).forward is torch.nn.Embedding.forward
    return isinstance(module, torch.nn.Embedding) and (plain or hasattr(module, "scalar_embed_scale"))


def packable_weights(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of `module` that `install` can replace.

    To quantize such a weight, group its values along its last axis, or along its second to last if
    `module.is_transposed`. A module whose attribute `stacked_weights` names weights [E, N, K] of experts is not
    transposed.
    """
    if is_linear(module) or is_embedding(module):
        return ("weight",)
    return tuple(name for name in stacked_weights(module) if isinstance(getattr(module, name), torch.Tensor))


def stacked_weights(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of `module` that have the matrices of all experts."""
    if is_experts(module):
        return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return getattr(module, "stacked_weights", ())


def install(model: torch.nn.Module, path: str, name: str, *operands, **quantization) -> Packed:
    """Replace a weight of `model`, in place, by a packed layer, and return that layer.

    `path` is the path of the submodule, and `name` one of its `packable_weights`. A linear layer or
    embedding is replaced as a whole. Of a module with experts, only the weight is replaced. `operands` and
    `quantization` are the arguments of `Packed`.
    """
    module = model.get_submodule(path)
    if name in stacked_weights(module):
        delattr(module, name)
        packed = MLXExperts(*operands, **quantization)
        module.add_module(name, packed)
        return packed
    if is_embedding(module):
        factor = getattr(module, "scalar_embed_scale", None)
        packed = MLXEmbedding(*operands, factor=factor, **quantization)
    else:
        packed = MLXLinear(*operands, bias=module.bias, **quantization)
    model.set_submodule(path, packed)
    return packed


def _frozen(t: torch.Tensor | None) -> torch.nn.Parameter | None:
    if t is None or isinstance(t, torch.nn.Parameter):
        return t
    return torch.nn.Parameter(t, requires_grad=False)
