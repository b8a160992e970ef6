"""Converts the weights of a model to the formats of the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from ....custom_ops.packing import FLOAT_MODES
from ..mtp import without_ends
from ..packed import install, is_linear, set_int8_activations, use_linear_layers
from ..precision import cast_parameters, compute_dtype, copy_unpacked, set_compute_dtype
from ..quantize import is_microscaled, linear_paths, quantize_model
from .calibration import Perplexity, Text, importance, linear_layers_in_float32, perplexity
from .scale_search import Format
from .sensitivity import choose, measure
from .tuning import tuned, visit_decoder_layers

DEFAULT_GROUP_SIZE = 32
MIXED_BITS = 4.8  # bits per weight of the linear layers on average, including scales: about as llama.cpp's Q4_K_M
_ENDS_BITS = 8  # bits of the ends of a model: the embedding and the output projection


@dataclass
class Conversion:
    """How the weights were converted. `unquantized` has the paths of the layers that stay in full precision."""

    unquantized: list[str] = field(default_factory=list)
    perplexity: Perplexity | None = None


def convert_weights(
    model: PreTrainedModel,
    quantize: str,
    group_size: int | None,
    dtype: torch.dtype | None,
    *,
    tokenizer: Any,
    calibrate: Path | None,
    activations: str = "float",
    progress: Callable[[str], Any],
) -> Conversion:
    """Pack, quantize and cast the weights of `model` in place. `export_llm` explains the arguments.

    The layers of `model` keep float activations. If `activations` is "int8", the perplexity is measured a second time
    with 8-bit activations.

    Calibration and perplexity need the token ids of a text. If `tokenizer` is None, quantization minimizes the error of
    each weight alone, and no perplexity is measured.
    """
    if is_microscaled(model):
        from ..microscaled import use_packed_weights  # imports prototypes of torchao

        use_packed_weights(model)
    _dequantize_float8(model)
    conversion = Conversion()
    if quantize != "none":
        use_linear_layers(model)  # now, because the calibration reads them
        text = before = None
        if tokenizer is not None:
            text = Text.read(tokenizer, calibrate, model.config.get_text_config().vocab_size)
            progress("measure the perplexity")
            before = perplexity(model, text.held_out)
        computed = dtype or compute_dtype(model)
        conversion.unquantized = _quantize(
            model, quantize, group_size or DEFAULT_GROUP_SIZE, computed, text, calibrate, progress
        )
        if dtype is None:
            set_compute_dtype(model, computed)
        else:
            cast_parameters(model, dtype)
        copy_unpacked(model)
        if text is not None:
            progress("measure the perplexity again")
            after = perplexity(model, text.held_out)
            int8 = _int8_perplexity(model, text, progress) if activations == "int8" else None
            conversion.perplexity = Perplexity(before, after, text.name, text.held_out.numel(), int8)
    elif dtype is not None:
        cast_parameters(model, dtype)
    return conversion


def _dequantize_float8(model: PreTrainedModel) -> None:
    """Replace torchao's FP8 weights of linear layers by floats, in place, because MLX has no products with them."""
    for module in model.modules():
        if is_linear(module) and type(module.weight).__name__ == "Float8Tensor":
            module.weight = torch.nn.Parameter(module.weight.dequantize(), requires_grad=False)


def convert_mtp(
    mtp: MtpModel, quantize: str, group_size: int | None, dtype: torch.dtype | None, computed: torch.dtype
) -> None:
    """Quantize and cast the weights of a head for multi-token prediction in place. `computed` is the model's dtype.

    Does not calibrate, because the head only guesses tokens. Its precision changes how many guesses are accepted, but
    not the answers.
    """
    with without_ends(mtp):
        if quantize != "none":
            common = _common_format(quantize, group_size or DEFAULT_GROUP_SIZE)
            quantize_model(mtp, common.bits, common.group_size, mode=common.mode, dtype=_scales_dtype(computed))
        if dtype is not None:
            cast_parameters(mtp, dtype)


def _common_format(quantize: str, group_size: int) -> Format:
    """Return the format of the layers that have no format of their own. A float mode ignores `group_size`."""
    mode = quantize if quantize in FLOAT_MODES else "affine"
    return Format(8 if quantize in ("int8", "mxfp8") else 4, group_size, mode)


def _scales_dtype(dtype: torch.dtype) -> torch.dtype:
    # Scales in half precision make the file smaller. They do not reduce the precision of products, which kernels
    # compute in float32.
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def _quantize(model, quantize, group_size, dtype, text: Text | None, calibrate, progress) -> list[str]:
    if quantize == "mixed" and text is None:
        raise ValueError("export_llm: quantize: got mixed without a tokenizer, which its measurement needs")
    scales_dtype = _scales_dtype(dtype)
    common = _common_format(quantize, group_size)
    formats: dict[str, Format] = {}
    importances: dict[str, torch.Tensor] = {}
    if quantize == "mixed":
        progress("measure the layers")
        with linear_layers_in_float32(model):
            formats = _mixed_formats(model, text)
    if text is not None:
        progress("calibrate")
        if calibrate is not None and common.mode == "affine":
            _tune(model, text, common, formats, scales_dtype)
        elif common.bits < 8:
            importances = importance(model, text.calibration)
    progress(f"quantize to {quantize}")
    return quantize_model(
        model,
        common.bits,
        group_size,
        mode=common.mode,
        ends_bits=_ENDS_BITS,
        dtype=scales_dtype,
        formats=formats,
        importance=importances,
    )


def _int8_perplexity(model: PreTrainedModel, text: Text, progress: Callable[[str], Any]) -> float:
    progress("measure the perplexity with activations in 8 bits")
    set_int8_activations(model, True)
    try:
        return perplexity(model, text.held_out)
    finally:
        set_int8_activations(model, False)


def _mixed_formats(model: PreTrainedModel, text: Text) -> dict[str, Format]:
    paths = [path for path in linear_paths(model) if model.get_submodule(path).weight.shape[1] % 32 == 0]
    effects = measure(model, text.calibration[:2], paths)
    return choose(effects, {path: model.get_submodule(path).weight.numel() for path in paths}, MIXED_BITS)


def _tune(model, text: Text, common: Format, formats: dict[str, Format], dtype: torch.dtype) -> None:
    """Replace the linear layers of the decoder layers by quantized ones, in order, tuned on the calibration text."""

    def visit(_, moments):
        for path, moment in moments.items():
            layer = model.get_submodule(path)
            format = formats.get(path, common)
            if is_linear(layer) and layer.weight.shape[1] % format.group_size == 0:
                operands = tuned(layer.weight, moment, format.bits, format.group_size, dtype)
                install(model, path, "weight", *operands, bits=format.bits, group_size=format.group_size)

    with linear_layers_in_float32(model):
        visit_decoder_layers(model, text.calibration, visit)
