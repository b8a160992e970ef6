"""Quantizes a model's weights into MLX's packing, layer by layer."""

from __future__ import annotations

from collections import Counter

import torch

from ..packing import quantize
from .packed import install, is_embedding, packable

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
_AT_ONCE = 1 << 22  # numbers that are in float32 at a time


def quantize_model(
    model: torch.nn.Module,
    bits: int,
    group_size: int = 64,
    *,
    embedding: bool = True,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Replace the linear layers, experts and, with `embedding`, embeddings of `model`, in place.

    Each weight is let go of before the next one is read. A row that `group_size` does not divide
    gets smaller groups. Tied weights stay tied: without `embedding` a tied head keeps its weight.
    `dtype`: that of scales and biases, by default the weight's. Returns the paths of the layers
    whose rows no group divides; they stay as they are. Raises ValueError if there is no such
    packing.
    """
    for name, value, known in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
        if value not in known:
            raise ValueError(f"quantize_model: {name} is {value}, expected one of {known}")
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared, kept = {}, []
    # By path: a list of the layers themselves would hold all of their weights.
    for path, name in [(p, n) for p, module in model.named_modules() for n in packable(module)]:
        module = model.get_submodule(path)
        weight = getattr(module, name)
        key = id(weight) if uses[id(weight)] > 1 else None
        if not embedding and (key is not None or is_embedding(module)):
            continue
        rows = weight.mT if getattr(module, "is_transposed", False) else weight
        group = next((g for g in GROUP_SIZES[::-1] if g <= group_size and rows.shape[-1] % g == 0), None)
        if group is None:
            kept.append(path)
            continue
        first = shared.get(key)
        operands = _quantized(rows, bits, group, dtype) if first is None else first.operands()[:3]
        packed = install(model, path, name, *operands, bits=bits, group_size=group)
        if key is not None:
            shared[key] = packed
    return kept


def is_microscaled(model: torch.nn.Module) -> bool:
    """Whether `model` has weights of torchao's that `microscaled` packs."""
    return any(type(p).__name__ in ("NVFP4Tensor", "MXTensor") for p in model.parameters())


def _quantized(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype | None):
    """`packing.quantize` of a weight [..., K], some rows at a time."""
    rows = weight.detach().flatten(0, -2)
    count, columns = rows.shape
    made = [
        torch.empty(count, columns * bits // 32, dtype=torch.uint32),
        *(torch.empty(count, columns // group, dtype=dtype or weight.dtype) for _ in range(2)),
    ]
    step = max(1, _AT_ONCE // columns)
    for first in range(0, count, step):
        for whole, part in zip(made, quantize(rows[first : first + step], bits, group, dtype)):
            whole[first : first + step] = part
    return [t.unflatten(0, weight.shape[:-1]) for t in made]
