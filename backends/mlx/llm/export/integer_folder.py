"""Loads checkpoints of GPTQ, AWQ and compressed-tensors. Their integers are kept, in MLX's packed format.

All three store a weight as scale * (q - zero), with a scale and a zero for each group of columns. In MLX, a weight is
scale * q + bias. Weights of compressed-tensors in FP8 become float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...custom_ops.packing import pack, unpack
from .mlx_folder import install_all, renamed, stack_experts
from .quantize import GROUP_SIZES
from .weights import empty_model, read_tensors

Tensors = dict[str, torch.Tensor]
_BITS = (2, 4, 8)  # elements of these sizes do not cross the bytes, so that all formats have the same order of bits
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the position of each 4-bit element of a word


def has_integers(settings: dict) -> bool:
    """Whether `load_integers` reads a checkpoint with these settings, the `quantization_config` of its config."""
    return _reader(settings) is not None


def load_integers(folder: Path) -> PreTrainedModel:
    """Return the model in `folder` with packed weights.

    Weights whose groups MLX lacks become floats. Raises ValueError if the tensors do not match the model.
    """
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    marker, read = _reader(settings)
    model, config = empty_model(folder)
    tensors = read_tensors(folder)
    for name in [name for name in tensors if name.endswith(f".{marker}")]:
        path = name.removesuffix(f".{marker}")
        own = {n: tensors.pop(f"{path}.{n}") for n in _PARTS if f"{path}.{n}" in tensors}
        try:
            tensors |= {f"{path}.{leaf}": tensor for leaf, tensor in read(own, settings).items()}
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path}: cannot read the tensors {', '.join(own)}: {error}") from error
    tensors = renamed(tensors, model)
    stack_experts(model, tensors)
    return install_all(model, config, tensors, folder)


# The tensors of a weight, in all formats.
_PARTS = (
    "qweight", "qzeros", "scales", "g_idx",
    "weight", *(f"weight_{name}" for name in ("packed", "scale", "zero_point", "shape", "g_idx")), "input_scale",
)  # fmt: skip


def _in_mlx_format(w, scales, zeros, groups, bits: int) -> Tensors:
    """Return the weight, scales and biases of MLX's format, or a weight of floats if MLX lacks the groups.

    `w` [N, K * bits / 32] is the packed weight, `scales` and `zeros` [N, G] belong to the groups, and `groups` [K] has
    the index of the group of each column; None stands for groups of consecutive columns.
    """
    if bits not in _BITS:
        raise ValueError(f"got {bits} bits, expected {', '.join(map(str, _BITS))}")
    columns, count = w.shape[1] * 32 // bits, scales.shape[1]
    biases = -(zeros * scales.float())
    in_order = torch.arange(columns) * count // columns
    size = next((s for s in GROUP_SIZES[::-1] if columns // count % s == 0), None)
    if size is None or groups is not None and not groups.equal(in_order.to(groups.dtype)):
        index = in_order if groups is None else groups.long()
        return {"weight": unpack(w, bits) * scales.float()[:, index] + biases[:, index]}
    repeats = columns // count // size
    # The products of scales and zeros may need more precision than the scales.
    dtype = scales.dtype if biases.to(scales.dtype).float().equal(biases) else torch.float32
    scales, biases = (t.to(dtype).repeat_interleave(repeats, 1) for t in (scales, biases))
    return {"weight": w.view(torch.uint32), "scales": scales, "biases": biases}


# Each function below takes the tensors of a weight and the settings, and returns the tensors of the loaded layer.


def _gptq(t: Tensors, settings: dict) -> Tensors:
    bits = t["qzeros"].shape[1] * 32 // t["scales"].shape[1]
    zeros = unpack(t["qzeros"], bits).T.float()
    # The first version of the format subtracts 1 from the zeros, modulo the number of integers.
    if settings.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) % 2**bits
    return _in_mlx_format(t["qweight"].T.contiguous(), t["scales"].T.contiguous(), zeros, t.get("g_idx"), bits)


def _awq(t: Tensors, settings: dict) -> Tensors:
    def in_order(words: torch.Tensor) -> torch.Tensor:
        elements = unpack(words, 4).unflatten(1, (-1, 8))
        return elements[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(1).T.contiguous()

    zeros = in_order(t["qzeros"]).float()
    return _in_mlx_format(pack(in_order(t["qweight"]), 4), t["scales"].T.contiguous(), zeros, None, 4)


def _packed_integers(t: Tensors, settings: dict) -> Tensors:
    rows, columns = t["weight_shape"].tolist()
    bits = t["weight_packed"].shape[1] * 32 // columns
    zeros = t.get("weight_zero_point")
    if zeros is None:
        zeros = torch.full(t["weight_scale"].shape, 2.0 ** (bits - 1))
    else:
        zeros = unpack(zeros.T.contiguous(), bits).T[:rows].float()
    return _in_mlx_format(t["weight_packed"], t["weight_scale"], zeros, t.get("weight_g_idx"), bits)


def _numbers_of_8_bits(t: Tensors, settings: dict) -> Tensors:
    weight, scales = t["weight"], t["weight_scale"]
    scales = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    if weight.dtype == torch.int8 and len(scales) in (1, len(weight)):
        scales = scales.expand(len(weight), -1).contiguous()
        zeros = t.get("weight_zero_point", torch.zeros(scales.shape)).reshape(-1, scales.shape[1]).float() + 128
        zeros = zeros.expand_as(scales)
        return _in_mlx_format((weight.view(torch.uint8) ^ 128).view(torch.uint32), scales, zeros, None, 8)
    for axis, size in enumerate(weight.shape):  # a scale may belong to a block of rows and columns
        blocks = scales.shape[axis]
        scales = scales.repeat_interleave(-(-size // blocks), axis).narrow(axis, 0, size)
    return {"weight": weight.float() * scales.float()}


_READERS: dict[str, tuple[str, Callable[[Tensors, dict], Tensors]]] = {
    "gptq": ("qweight", _gptq),
    "awq": ("qweight", _awq),
    "pack-quantized": ("weight_packed", _packed_integers),
    "float-quantized": ("weight_scale", _numbers_of_8_bits),
    "int-quantized": ("weight_scale", _numbers_of_8_bits),
    "naive-quantized": ("weight_scale", _numbers_of_8_bits),
}


def _reader(settings: dict) -> tuple[str, Callable[[Tensors, dict], Tensors]] | None:
    """Return the name of a tensor that each quantized weight has, and the function that reads a weight, or None."""
    kind = settings.get("quant_method")
    if kind == "awq" and settings.get("version", "gemm").lower() != "gemm":
        return None
    return _READERS.get(settings.get("format") if kind == "compressed-tensors" else kind)
