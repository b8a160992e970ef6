"""Quantizes the weights of a model into MLX's packed format, layer by layer."""

from __future__ import annotations

from collections import Counter

import torch

from ...custom_ops.packing import quantize
from .packed import install, is_embedding, packable_weights

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
_STEP_ELEMENTS = 1 << 22  # the number of weights that are converted to float32 at a time, to bound the peak memory


def quantize_model(
    model: torch.nn.Module,
    bits: int,
    group_size: int = 64,
    *,
    embedding: bool = True,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Quantize the linear layers, experts and, with `embedding`, the embeddings of `model`.

    Changes `model` in place: each layer is replaced by a packed layer. A group is part of a row of the
    weight. If the length of the rows is not a multiple of `group_size`, the weight gets a smaller group
    size: the largest that divides the length. Tied weights stay tied: without `embedding`, an output
    projection that is tied to the embedding is not quantized either. `dtype` is the dtype of the scales and
    biases, by default the dtype of the weight. Each weight is released before the next one is read.

    Returns the paths of the layers that stay unquantized, because the length of their rows is not a
    multiple of any group size. Raises ValueError for `bits` other than 4 or 8, or a `group_size` other than
    32, 64 or 128.
    """
    for name, value, expected in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
        if value not in expected:
            raise ValueError(f"quantize_model: {name}: got {value}, expected one of {expected}")
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared, unquantized = {}, []
    # The list holds paths, because a list of layers would keep the weights of all layers alive.
    for path, name in [(p, n) for p, module in model.named_modules() for n in packable_weights(module)]:
        module = model.get_submodule(path)
        weight = getattr(module, name)
        key = id(weight) if uses[id(weight)] > 1 else None
        if not embedding and (key is not None or is_embedding(module)):
            continue
        rows = weight.mT if getattr(module, "is_transposed", False) else weight
        group = next((g for g in GROUP_SIZES[::-1] if g <= group_size and rows.shape[-1] % g == 0), None)
        if group is None:
            unquantized.append(path)
            continue
        first = shared.get(key)
        operands = _quantized(rows, bits, group, dtype) if first is None else first.packed_arguments()[:3]
        packed = install(model, path, name, *operands, bits=bits, group_size=group)
        if key is not None:
            shared[key] = packed
    return unquantized


def is_microscaled(model: torch.nn.Module) -> bool:
    """Whether a weight of `model` is in torchao's NVFP4 or MX format."""
    return any(type(p).__name__ in ("NVFP4Tensor", "MXTensor") for p in model.parameters())


def _quantized(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the packed weight, scales and biases of a weight [..., K], as `packing.quantize` computes them.

    Only a few rows are quantized at a time.
    """
    rows = weight.detach().flatten(0, -2)
    count, columns = rows.shape
    results = [
        torch.empty(count, columns * bits // 32, dtype=torch.uint32),
        *(torch.empty(count, columns // group, dtype=dtype or weight.dtype) for _ in range(2)),
    ]
    step = max(1, _STEP_ELEMENTS // columns)
    for first in range(0, count, step):
        for result, part in zip(results, quantize(rows[first : first + step], bits, group, dtype)):
            result[first : first + step] = part
    return [t.unflatten(0, weight.shape[:-1]) for t in results]
