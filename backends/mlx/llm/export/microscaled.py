"""Converts torchao's NVFP4 and MX weights to MLX's packed format. The bytes stay the same."""

from __future__ import annotations

import torch
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.prototype.mx_formats.utils import from_blocked

from ...custom_ops.packing import FLOAT_MODES
from .packed import MLXLinear, is_linear


def use_packed_weights(model: torch.nn.Module) -> list[str]:
    """Replace each linear layer of `model` whose weight is an `NVFP4Tensor` or `MXTensor` by a packed layer.

    Changes `model` in place, and returns the paths of the replaced layers. The packed weights consist
    of the same bytes; they are not dequantized. Raises ValueError for a format that MLX lacks, and for a
    layer with quantized activations, because MLX's instructions take float activations for these formats.
    """
    replaced = []
    for path, layer in list(model.named_modules()):
        if is_linear(layer) and isinstance(layer.weight, (NVFP4Tensor, MXTensor)):
            model.set_submodule(path, _packed(path, layer))
            replaced.append(path)
    return replaced


def _packed(path: str, layer: torch.nn.Linear) -> MLXLinear:
    """Return the packed layer that replaces `layer`."""
    weight = layer.weight
    rows, columns = weight.shape
    data = weight.qdata.view(torch.uint8)
    bits = data.shape[1] * 8 // columns
    mode = "nvfp4" if isinstance(weight, NVFP4Tensor) else f"mxfp{bits}"
    if FLOAT_MODES.get(mode) != (bits, weight.block_size) or _is_e5m2(weight):
        supported = ", ".join(f"{name} ({b} bits, blocks of {size})" for name, (b, size) in FLOAT_MODES.items())
        raise ValueError(
            f"{path}: weight: got {type(weight).__name__} of {bits} bits in blocks of {weight.block_size}, "
            f"expected {supported}"
        )
    if weight.act_quant_kwargs is not None:
        raise ValueError(f"{path}: got quantized activations, expected quantized weights only")
    scales = weight.scale.view(torch.uint8)
    if weight.is_swizzled_scales:
        scales = from_blocked(scales, rows, columns // weight.block_size)
    return MLXLinear(
        data.contiguous().view(torch.int32),
        scales.reshape(rows, -1).contiguous(),
        bias=layer.bias,
        factor=getattr(weight, "per_tensor_scale", None),
        bits=bits,
        group_size=weight.block_size,
        mode=mode,
    )


def _is_e5m2(weight: torch.Tensor) -> bool:
    return getattr(weight, "elem_dtype", None) == torch.float8_e5m2
