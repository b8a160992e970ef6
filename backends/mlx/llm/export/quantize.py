"""Quantizes the weights of a model into MLX's packed format, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from .packed import MLXLinear, install, is_embedding, is_linear, packable_weights, use_linear_layers
from .quantization.scale_search import Format, quantized

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)


def quantize_model(
    model: torch.nn.Module,
    bits: int,
    group_size: int = 64,
    *,
    mode: str = "affine",
    embedding: bool = True,
    ends_bits: int | None = None,
    dtype: torch.dtype | None = None,
    formats: Mapping[str, Format] = {},
    importance: Mapping[str, torch.Tensor] = {},
) -> list[str]:
    """Quantize the linear layers, experts and, with `embedding`, the embeddings of `model`.

    Changes `model` in place: each layer is replaced by a packed layer. A group is part of a row of the
    weight. If the length of the rows is not a multiple of `group_size`, the weight gets a smaller group
    size: the largest that divides the length. Tied weights stay tied: without `embedding`, an output
    projection that is tied to the embedding is not quantized either. Each weight is released before the
    next one is read.

    - `mode`: `affine`, or a mode of `FLOAT_MODES`, which sets `bits` and `group_size` of all layers but
      the embedding and the output projection.
    - `ends_bits`: the bits of the ends of the model, which are the embedding and the output projection; by default
      `bits`.
    - `dtype`: the dtype of scales and biases, by default the dtype of the weight.
    - `formats`: path of a linear layer → its format, in place of `bits`, `group_size` and `mode`.
    - `importance`: path of a layer → the importance [K] of the columns of its weight, as `scale_search.fit` takes it.

    Returns the paths of the layers that stay unquantized, because the length of their rows is not a
    multiple of any group size. Raises ValueError for `bits` other than 4 or 8, or a `group_size` other than
    32, 64 or 128.
    """
    for name, value, expected in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
        if value not in expected:
            raise ValueError(f"quantize_model: {name}: got {value}, expected one of {expected}")
    use_linear_layers(model)
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    ends = Format(ends_bits or bits, group_size)
    common = Format(bits, group_size) if mode == "affine" else Format.of(mode)
    shared, unquantized = {}, []
    # The list holds paths, because a list of layers would keep the weights of all layers alive.
    for path, name in [(p, n) for p, module in model.named_modules() for n in packable_weights(module)]:
        module = model.get_submodule(path)
        weight = getattr(module, name)
        key = id(weight) if uses[id(weight)] > 1 else None
        is_end = is_embedding(module) or module is head
        if not embedding and (key is not None or is_embedding(module)):
            continue
        rows = weight.mT if getattr(module, "is_transposed", False) else weight
        format = _fitting(ends if is_end else formats.get(path, common), rows.shape[-1])
        if format is None:
            unquantized.append(path)
            continue
        first = shared.get(key)
        if first is None:
            packed = _quantize(model, path, name, rows, format, dtype or weight.dtype, importance.get(path))
        else:
            *operands, group_size_, bits_, mode_ = first.packed_arguments()
            packed = install(model, path, name, *operands, group_size=group_size_, bits=bits_, mode=mode_)
        if key is not None:
            shared[key] = packed
    return unquantized


def linear_paths(model: torch.nn.Module) -> list[str]:
    """Return the paths of the linear layers of `model`, without the output projection."""
    head = model.get_output_embeddings()
    return [path for path, module in model.named_modules() if is_linear(module) and module is not head]


def is_microscaled(model: torch.nn.Module) -> bool:
    """Whether a weight of `model` is in torchao's NVFP4 or MX format."""
    return any(type(p).__name__ in ("NVFP4Tensor", "MXTensor") for p in model.parameters())


def _fitting(format: Format, columns: int) -> Format | None:
    """Return `format` if its group size divides `columns`.

    Otherwise, return the format with the largest smaller group size that divides `columns`, or None. A float mode has
    only one group size, and `columns` must also be a multiple of 32.
    """
    if format.mode != "affine":
        return format if columns % max(32, format.group_size) == 0 else None
    group = next((g for g in GROUP_SIZES[::-1] if g <= format.group_size and columns % g == 0), None)
    return None if group is None else Format(format.bits, group)


def _quantize(model, path: str, name: str, rows: torch.Tensor, format: Format, dtype: torch.dtype, importance):
    """Replace the weight `name` of the layer at `path` by its quantized `rows`, and return the packed layer."""
    module, factor = model.get_submodule(path), None
    if format.mode == "nvfp4" and is_linear(module):
        # E4M3 scales have 3 bits of mantissa from 2^-6 on. The factor makes the largest scale 448.
        factor = float(rows.abs().max()) / (6 * 448) or None
        rows = rows if factor is None else rows / factor
    operands = quantized(rows, format, dtype, importance)
    packed = install(model, path, name, *operands, bits=format.bits, group_size=format.group_size, mode=format.mode)
    if factor is not None and isinstance(packed, MLXLinear):
        packed.factor = factor
    return packed
