"""Folders of GPTQ, AWQ, AutoRound, compressed-tensors and bitsandbytes, and with FP8, NVFP4 or MXFP4 weights.

Also those of BitNet, of Gemma's quantization, and of Metal, the quantization of transformers for Apple GPUs.

Integers, NVFP4 and MXFP4 elements are kept, in MLX's packed format. GPTQ, AWQ, AutoRound and compressed-tensors store a
weight as scale * (q - zero), with a scale and a zero for each group of columns. In MLX, a weight is scale * q + bias.
The weights of FP8 and of bitsandbytes become floats.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from ....custom_ops.packing import FLOAT_MODES, pack, unpack
from ..experts import use_gathered_experts
from ..packed import install, is_experts, packable_weights
from ..quantize import GROUP_SIZES
from .checks import check_loaded, setting
from .hf import HFFolder
from .install import Tensors, finish, install_all, renamed, set_generation_config, stack_experts, submodule
from .language_part import language_tensors

_BITS = (2, 4, 8)  # elements of these sizes do not cross the bytes, so that all formats have the same order of bits
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the position of each 4-bit element of a word
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# What the names of the scales of an FP8 weight add to the name of the weight.
_FP8_SCALES = ("_scale_inv", "_scale", "_weight_scale")
# Tensors for activations and KV caches in 8 bits, which the program keeps in floats.
_UNUSED = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "kv_scale",
    "input_activation_scale",
    "output_activation_scale",
    *(f"{name}_{part}" for name in "qkv" for part in ("scale", "zero_point", "cache_scale")),
)
# The names of an embedding's tensors in Gemma's quantization → the names of a linear layer's.
_OF_EMBEDDING = {"embedding_quantized": "weight", "embedding_scale": "weight_scale"}


def can_read(settings: dict) -> bool:
    """Whether `QuantizedFolder` reads a checkpoint with these settings, the `quantization_config` of its config.

    Raises ValueError for a setting of a wrong type.
    """
    _block_size(settings)
    return _is_gpt_oss(settings) or _reader(settings) is not None


def _is_gpt_oss(settings: dict) -> bool:
    """Whether weights in MXFP4 are stored as tensors `…_blocks` and `…_scales`, as in gpt-oss."""
    return settings.get("quant_method") == "mxfp4"


class QuantizedFolder(HFFolder):
    """A folder of Hugging Face with quantized weights that are kept, or whose values become floats."""

    def check(self) -> None:
        self.check_transform()

    def _load(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """Return the model. FP8 weights, and integers whose groups MLX lacks, become floats of `dtype`.

        By default, this is the dtype in the config.
        """
        self.check()
        model = use_gathered_experts(self.empty_model())
        if _is_gpt_oss(self.quantization):
            return finish(model, _install_all_blocks(model, self.tensors()), self.path)
        dtype = dtype or model.config.dtype or torch.float32
        tensors = language_tensors(model, self.tensors(), self.model_type)
        tensors = _read_weights(model, tensors, self.quantization, dtype)
        if not any(name.endswith(".scales") for name in tensors) and not _has_experts_without_conversion(model):
            return self._load_floats(model, tensors, dtype)
        tensors = renamed(tensors, model)
        stack_experts(model, tensors)
        # Older versions of AutoGPTQ store zero biases for layers without a bias.
        expected = model.state_dict()
        tensors = {n: t for n, t in tensors.items() if n in expected or not n.endswith(".bias") or t.any()}
        return install_all(model, tensors, self.path)

    def _load_floats(self, model: PreTrainedModel, tensors: Tensors, dtype: torch.dtype) -> PreTrainedModel:
        """Return a model like `model` of `dtype` with `tensors`, none of which is packed.

        transformers converts the names and layouts of the tensors.
        """
        model, info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=tensors,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        check_loaded(model, info, f"load_causal_lm: {self.path}")
        set_generation_config(model, self.path)
        return model


def _read_weights(model: PreTrainedModel, tensors: Tensors, settings: dict, dtype: torch.dtype) -> Tensors:
    """Return `tensors` with weights that are packed as in MLX, or floats of `dtype`."""
    marker, read = _reader(settings)
    columns = {path: m.weight.shape[-1] for path, m in model.named_modules() if getattr(m, "weight", None) is not None}
    for path, _, leaf in [name.rpartition(".") for name in tensors]:
        if leaf in _OF_EMBEDDING:
            tensors[f"{path}.{_OF_EMBEDDING[leaf]}"] = tensors.pop(f"{path}.{leaf}")
    _read_fp8(tensors, _block_size(settings), dtype)
    for name in [name for name in tensors if name.endswith(f".{marker}")]:
        path = name.removesuffix(f".{marker}")
        own = {n: tensors.pop(f"{path}.{n}") for n in _PARTS if f"{path}.{n}" in tensors}
        try:
            parts = read(own, settings | {"columns": columns.get(path)})
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path}: cannot read the tensors {', '.join(own)}: {error}") from error
        if parts.keys() == {"weight"}:
            parts["weight"] = parts["weight"].to(dtype)
        tensors |= {f"{path}.{leaf}": tensor for leaf, tensor in parts.items()}
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in _UNUSED}


def _has_experts_without_conversion(model: PreTrainedModel) -> bool:
    """Whether transformers cannot stack the experts of `model`. Those of Llama 4 are stacked in its own checkpoints."""
    conversions = get_model_conversion_mapping(model)
    return any(map(is_experts, model.modules())) and not any(isinstance(c, WeightConverter) for c in conversions)


# The tensors of a weight that is kept, in all formats.
_PARTS = (
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight",
    "qbiases",
    *(f"weight_{n}" for n in ("packed", "scale", "zero_point", "shape", "g_idx", "scale_2", "global_scale", "format")),
    "SCB",
    *(f"weight.{n}" for n in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")),
    *(f"weight.quant_state.bitsandbytes__{n}" for n in ("nf4", "fp4")),
)


def _block_size(settings: dict) -> tuple[int, int] | None:
    """Return the rows and columns of the blocks of an FP8 weight that share a scale, or None if it is not stored."""
    groups = setting(settings, "config_groups", dict, {})
    sizes = [setting(setting(groups, name, dict, {}), "weights", dict, {}).get("block_structure") for name in groups]
    size = next(filter(None, (settings.get("weight_block_size"), *sizes)), None)
    try:
        rows, columns = (1, 1) if size is None else map(int, size.split("x") if isinstance(size, str) else size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"quantization_config: got the block size {size!r}, expected two integers") from error
    return None if size is None else (rows, columns)


def _read_fp8(tensors: Tensors, block_size: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """Replace the FP8 weights in `tensors` by floats, in place."""
    for name in [n for n, tensor in tensors.items() if tensor.dtype in _FP8 and not n.endswith(_FP8_SCALES)]:
        scales = [tensors.pop(f"{name}{end}") for end in _FP8_SCALES if f"{name}{end}" in tensors]
        if len(scales) != 1:
            raise ValueError(f"{name}: got {tensors[name].dtype} and {len(scales)} scales, expected one")
        weight = tensors[name].float()
        tensors[name] = weight.mul_(_expanded(scales[0], weight.shape, block_size, name)).to(dtype)


def _expanded(scales: torch.Tensor, shape: torch.Size, block_size: tuple[int, int] | None, name: str) -> torch.Tensor:
    """Return the scales of a weight as floats, one for each element, or with axes of size 1 along which they are equal.

    `scales` is a number, or has an element for each row, or an element for each block of the weight.
    """
    # Scales in 8 bits are powers of two, some stored as plain bytes.
    scales = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.dim() == 1:
        scales = scales.reshape(-1, *[1] * (len(shape) - 1))
    if scales.dim() != len(shape):
        raise ValueError(f"{name}: got scales {list(scales.shape)} for a weight {list(shape)}")
    sizes = (1,) * (len(shape) - 2) + (block_size or (0, 0))
    for axis, (size, block) in enumerate(zip(shape, sizes)):
        count = scales.shape[axis]
        if count == 1:
            continue
        if not block or -(-size // block) != count:  # a weight may have blocks of its own
            block, rest = divmod(size, count)
            if rest:
                raise ValueError(f"{name}: got {count} scales along axis {axis}, where the weight has {size} elements")
        scales = scales.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scales


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


# Each function below takes the tensors of a weight and the settings, and returns the tensors of the loaded layer. The
# settings also have `columns`, the number of columns of the weight, if the layer is known by its path.


def _gptq(t: Tensors, settings: dict) -> Tensors:
    bits = t["qzeros"].shape[1] * 32 // t["scales"].shape[1]
    zeros = unpack(t["qzeros"], bits).T.float()
    # The first version of the format subtracts 1 from the zeros, modulo the number of integers.
    if settings.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) % 2**bits
    return _in_mlx_format(t["qweight"].T.contiguous(), t["scales"].T.contiguous(), zeros, t.get("g_idx"), bits)


def _gptq_v2(t: Tensors, settings: dict) -> Tensors:
    return _gptq(t, settings | {"checkpoint_format": "gptq_v2"})


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


def _nvfp4(t: Tensors, settings: dict) -> Tensors:
    """Besides the scales, there is a factor for the whole weight: `weight_scale_2`, or its inverse."""
    factor = t["weight_scale_2"] if "weight_scale_2" in t else 1 / t["weight_global_scale"]
    words = t.get("weight_packed", t.get("weight")).contiguous().view(torch.uint32)
    return {"weight": words, "scales": t["weight_scale"].view(torch.uint8), "factor": factor.float().reshape(())}


def _mxfp4(t: Tensors, settings: dict) -> Tensors:
    return {"weight": t["weight_packed"].contiguous().view(torch.uint32), "scales": t["weight_scale"].view(torch.uint8)}


def _compressed(t: Tensors, settings: dict) -> Tensors:
    """The layers of a checkpoint may have different formats."""
    if "weight_shape" in t:
        return _packed_integers(t, settings)
    if "weight_packed" in t:
        return _nvfp4(t, settings) if "weight_global_scale" in t else _mxfp4(t, settings)
    return _integers_of_8_bits(t, settings)


def _bitsandbytes_4_bits(t: Tensors, settings: dict) -> Tensors:
    """An element is the index of a value in `quant_map`, which is multiplied by the `absmax` of its block.

    `absmax` may be quantized in the same way, in 8 bits.
    """
    state = json.loads(bytes(next(t[name] for name in t if "quant_state" in name).tolist()))
    absmax = t["weight.absmax"]
    if "weight.nested_absmax" in t:
        factors = t["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(absmax)]
        absmax = t["weight.nested_quant_map"][absmax.long()] * factors + state["nested_offset"]
    packed = t["weight"].contiguous().view(torch.uint8)  # may be stored in another dtype
    elements = torch.stack((packed >> 4, packed & 15), -1).flatten()
    values = t["weight.quant_map"][elements.int()] * absmax.repeat_interleave(state["blocksize"])[: len(elements)]
    return {"weight": values.reshape(state["shape"])}


def _bitsandbytes_8_bits(t: Tensors, settings: dict) -> Tensors:
    return {"weight": t["weight"] * (t["SCB"].float() / 127).unsqueeze(1)}


def _integers_of_8_bits(t: Tensors, settings: dict) -> Tensors:
    if "weight_scale_2" in t:  # Model Optimizer's weights are NVFP4 if they are not FP8
        return _nvfp4(t, settings)
    weight, scales = t["weight"], t["weight_scale"]
    if weight.dtype != torch.int8:
        raise ValueError(f"got a weight of {weight.dtype}, expected {torch.int8}")
    scales = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    if len(scales) not in (1, len(weight)):
        return {"weight": weight.float() * _expanded(scales, weight.shape, _block_size(settings), "weight")}
    scales = scales.expand(len(weight), -1).contiguous()
    zeros = t.get("weight_zero_point", torch.zeros(scales.shape)).reshape(-1, scales.shape[1]).float() + 128
    zeros = zeros.expand_as(scales)
    return _in_mlx_format((weight.view(torch.uint8) ^ 128).view(torch.uint32), scales, zeros, None, 8)


def _bitnet(t: Tensors, settings: dict) -> Tensors:
    """The elements are 0, 1 and 2, which stand for -1, 0 and 1. A byte has those of four rows, a quarter apart."""
    elements = torch.cat([t["weight"] >> shift & 3 for shift in (0, 2, 4, 6)])
    scale = t["weight_scale"].float()
    if settings.get("linear_class", "bitlinear") == "bitlinear":
        scale = 1 / scale
    scales = scale.reshape(1, 1).expand(len(elements), 1)
    return _in_mlx_format(pack(elements, 2), scales, torch.ones(scales.shape), None, 2)


def _gemma(t: Tensors, settings: dict) -> Tensors:
    """Integers of 2 and 4 bits are stored without a sign, and those of 8 bits with one."""
    words, scales = t["weight"].contiguous().view(torch.uint8), t["weight_scale"].float()
    if settings["columns"] is None:
        raise ValueError("expected a linear layer or an embedding of the model")
    bits = words.shape[1] * 8 // settings["columns"]
    if bits == 8:
        words = words ^ 128
    return _in_mlx_format(words.view(torch.uint32), scales, torch.full(scales.shape, 2.0 ** (bits - 1)), None, bits)


def _metal(t: Tensors, settings: dict) -> Tensors:
    return {"weight": t["weight"], "scales": t["scales"], "biases": t["qbiases"]}


_READERS: dict[str, tuple[str, Callable[[Tensors, dict], Tensors]]] = {
    "gptq": ("qweight", _gptq),
    "awq": ("qweight", _awq),
    "bitnet": ("weight_scale", _bitnet),
    "gemma": ("weight_scale", _gemma),
    "metal": ("qbiases", _metal),
    **dict.fromkeys(
        (
            "pack-quantized",
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "float-quantized",
            "int-quantized",
            "naive-quantized",
            "mixed-precision",
            "dense",
        ),
        ("weight_scale", _compressed),
    ),
    **dict.fromkeys(("fp8", "mxfp8", "fbgemm_fp8", "modelopt", "quark"), ("weight_scale", _integers_of_8_bits)),
}


def _reader(settings: dict) -> tuple[str, Callable[[Tensors, dict], Tensors]] | None:
    """Return the name of a tensor that each kept weight has, and the function that reads such a weight, or None."""
    kind = setting(settings, "quant_method", str)
    if kind == "awq" and setting(settings, "version", str, "gemm").lower() != "gemm":
        return None
    if kind == "bitnet" and (settings.get("quantization_mode") == "online" or settings.get("use_rms_norm")):
        return None
    if kind in ("auto-round", "intel/auto-round"):
        return _auto_round_reader(settings)
    if kind == "bitsandbytes":
        is_4_bits = settings.get("load_in_4bit") or settings.get("_load_in_4bit")
        return ("weight.quant_map", _bitsandbytes_4_bits) if is_4_bits else ("SCB", _bitsandbytes_8_bits)
    return _READERS.get(setting(settings, "format", str, "dense") if kind == "compressed-tensors" else kind)


def _auto_round_reader(settings: dict) -> tuple[str, Callable[[Tensors, dict], Tensors]] | None:
    """Return the reader for a checkpoint of AutoRound, which has the tensors of GPTQ or AWQ, or None."""
    layout = setting(settings, "packing_format", str, "")
    if setting(settings, "data_type", str, "int") != "int" or setting(settings, "act_bits", int, 16) < 16:
        return None
    if "awq" in layout:
        return "qweight", _awq
    if "gptq" in layout and "gptqmodel" not in layout:
        return "qweight", _gptq
    return ("qweight", _gptq_v2) if layout.startswith("auto_round") else None


def _install_all_blocks(model: PreTrainedModel, tensors: Tensors) -> Tensors:
    """Replace the weights of `model` that are stored as blocks and scales, and return the other tensors."""
    for blocks_name in [name for name in tensors if name.endswith("_blocks")]:
        name = blocks_name.removesuffix("_blocks")
        if f"{name}_scales" in tensors:
            _install_blocks(model, name, tensors.pop(blocks_name), tensors.pop(f"{name}_scales"))
    return tensors


def _install_blocks(model: PreTrainedModel, name: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Replace the weight `name` of `model` by a packed one.

    `blocks` [..., N, G, 16] has two 4-bit elements in each byte, the first in the low bits, and `scales` [..., N, G]
    the exponents of the groups, both uint8.
    """
    path, _, weight_name = name.rpartition(".")
    module = submodule(model, path, f"{name}_blocks")
    if weight_name not in packable_weights(module):
        raise ValueError(f"{name}_blocks: {type(module).__name__} has no weight that can be packed under this name")
    weight = getattr(module, weight_name)
    shape = weight.mT.shape if getattr(module, "is_transposed", False) else weight.shape
    bits, group_size = FLOAT_MODES["mxfp4"]
    expected = [*shape[:-1], shape[-1] // group_size, group_size * bits // 8]
    shapes = list(blocks.shape), list(scales.shape)
    if {blocks.dtype, scales.dtype} != {torch.uint8} or shapes != (expected, expected[:-1]):
        raise ValueError(
            f"{name}: got blocks {blocks.dtype} {list(blocks.shape)} and scales {scales.dtype} {list(scales.shape)}, "
            f"expected uint8 {expected} and {expected[:-1]}"
        )
    packed = blocks.flatten(-2).view(torch.int32)
    install(model, path, weight_name, packed, scales, bits=bits, group_size=group_size, mode="mxfp4")
