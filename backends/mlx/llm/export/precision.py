"""The dtype in which a model computes, and casts of its weights."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel

from .packed import OPERANDS, MLXEmbedding, Packed


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters of `model` to `dtype`, in place. Tied parameters stay tied.

    Buffers keep their dtype: `model.to(dtype)` would also round the buffers that the model computes from
    its config, such as rotary frequencies. If `dtype` is float32, the scales and biases of packed weights keep their
    dtype too: half precision makes them smaller, and kernels compute the products in float32 anyway. If `dtype` is half
    precision, parameters that transformers keeps in float32, such as those of routers, become float32.

    Raises ValueError for a parameter of 8 bits: its values lack a scale, which only its module knows.
    """
    is_float32 = _float32_names(model, dtype).search
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.itemsize == 1 and not isinstance(module, Packed):
                raise ValueError(
                    f"{path}.{name}: got {parameter.dtype} in {type(module).__name__}, expected at least 16 bits"
                )
            is_kept = isinstance(module, Packed) and name in OPERANDS and dtype == torch.float32
            if parameter.is_floating_point() and not is_kept:
                parameter.data = parameter.data.to(torch.float32 if is_float32(f"{path}.{name}") else dtype)
    set_compute_dtype(model, dtype)


def _float32_names(model: torch.nn.Module, dtype: torch.dtype) -> re.Pattern:
    """Return a pattern in the names of the parameters that transformers keeps in float32 if the others are `dtype`."""
    names = {
        torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        torch.bfloat16: ("_keep_in_fp32_modules_strict",),
    }.get(dtype, ())
    parts = sorted({part for name in names for part in getattr(model, name, None) or ()})
    return re.compile("|".join(rf"(?:^|\.){re.escape(part)}(?:\.|$)" for part in parts) or r"(?!)")


def set_compute_dtype(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let the packed layers of `model` compute in `dtype`, which may differ from the dtype of their scales."""
    for module in model.modules():
        if isinstance(module, Packed):
            module.compute_in(dtype)


def copy_unpacked(model: torch.nn.Module) -> None:
    """Copy the parameters and buffers of `model` that are not packed, in place. Tied parameters stay tied.

    Tensors of a safetensors file share one mapping of the whole file. After a quantization, the few tensors that are
    left, such as those of the norms, would keep the pages of all original weights in memory.
    """
    for module in model.modules():
        if not isinstance(module, Packed):
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.data = tensor.data.clone()


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which `model` computes: that of its embeddings' results.

    `model.dtype` is the dtype of the first parameter, which may be the scales of a packed weight.
    """
    embedding = model.get_input_embeddings()
    return embedding.factor.dtype if isinstance(embedding, MLXEmbedding) else model.dtype
