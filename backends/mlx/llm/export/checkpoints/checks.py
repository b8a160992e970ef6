"""Checks of what transformers does with a checkpoint, and the errors of damaged ones.

transformers only warns about tensors that it ignores or initializes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, TorchAoConfig

# The kinds of quantization whose weights transformers loads as floats, or as tensors that an export can lower. It loads
# the others in modules with kernels of their own, ignores them, or lacks a package that reads them.
_LOADED_BY_TRANSFORMERS = ("torchao", "fp8", "mxfp8")
# What tells the layout of a quantization, in the settings of all kinds.
_LAYOUT = (
    "quant_method",
    "format",
    "version",
    "packing_format",
    "data_type",
    "act_bits",
    "quantization_mode",
    "use_rms_norm",
)

# What transformers, torch, safetensors and gguf raise, besides OSError and ValueError, for a damaged checkpoint. A
# value of the wrong type or size fails where it is first used.
CHECKPOINT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
)


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Within the context, the errors of a damaged checkpoint are ValueErrors."""
    try:
        yield
    except (AssertionError, ImportError, SafetensorError) as error:  # their texts say what is wrong
        raise ValueError(f"load_causal_lm: {checkpoint}: {error}") from error
    except CHECKPOINT_ERRORS as error:
        raise ValueError(f"load_causal_lm: {checkpoint}: damaged, or of an unknown layout: {error!r}") from error


def setting(settings: dict, name: str, kind: type, default: Any = None) -> Any:
    """Return a setting of a quantization, or `default` if it is missing. Raises ValueError for another type."""
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        expected = {str: "a text", int: "an integer", dict: "an object"}[kind]
        raise ValueError(f"quantization_config.{name}: got {str(value)[:80]!r}, expected {expected}")
    return value


def check_quantization(settings: dict, where: str) -> None:
    """Raise ValueError, beginning with `where`, if transformers cannot load a quantization for an export.

    `settings` are those of `quantization_settings`.
    """
    if settings.get("quant_method") == "torchao":
        _check_torchao(settings, where)
    if settings and settings.get("quant_method") not in _LOADED_BY_TRANSFORMERS:
        layout = {name: settings[name] for name in _LAYOUT if name in settings}
        raise ValueError(
            f"{where}: quantization_config: got {layout or settings}, which is not supported; export a checkpoint of "
            "the model with float weights"
        )


def _check_torchao(settings: dict, where: str) -> None:
    try:
        TorchAoConfig.from_dict(copy.deepcopy(settings))  # which takes the settings out of its argument
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        got = str(settings.get("quant_type", "no value"))[:200]
        message = f'got {got}, expected {{"default": …}} with a configuration of torchao'
        raise ValueError(f"{where}: config.json: quantization_config.quant_type: {message}: {error}") from error


def check_float8(folder: Path, settings: dict, where: str) -> None:
    """Raise ValueError, beginning with `where`, for 8-bit floats without `settings`.

    transformers would cast them without their scales.
    """
    if settings:
        return
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if (kind := file.get_slice(name).get_dtype()).startswith("F8"):
                    raise ValueError(f"{where}: {name}: got {kind}, but config.json has no quantization_config")


def check_loaded(model: PreTrainedModel, info: dict, where: str) -> None:
    """Raise ValueError, beginning with `where`, for tensors that do not match. `info` is the report of transformers."""
    shapes = [f"{name}: got {list(got)}, expected {list(expected)}" for name, got, expected in info["mismatched_keys"]]
    modules = dict(model.named_modules())
    unexpected = [name for name in info["unexpected_keys"] if _is_left_over(name, modules)]
    problems = {"wrong shapes": shapes, "missing tensors": info["missing_keys"], "unexpected tensors": unexpected}
    for problem, items in problems.items():
        if items:
            others = info["unexpected_keys"] if problem == "missing tensors" else ()
            note = f"; the files have others: {shortened(others)}" if others else ""
            raise ValueError(f"{where}: {problem} for {type(model).__name__}: {shortened(items)}{note}")


def _is_left_over(name: str, modules: dict[str, torch.nn.Module]) -> bool:
    """Whether a tensor that transformers did not use belongs to one of `modules`, the modules of a model by path.

    If the module has weights, the tensor is probably part of a quantization, such as a scale. transformers ignores some
    biases on purpose.
    """
    path, _, leaf = name.rpartition(".")
    module = modules.get(path)
    if module is None or next(module.parameters(recurse=False), None) is None:
        return False
    return leaf != "bias" and not hasattr(module, leaf)


def shortened(items: Iterable[str]) -> str:
    """Return the first five of the sorted items, separated by commas, and "…" if there are more."""
    items = sorted(items)
    return ", ".join(items[:5]) + (" …" if len(items) > 5 else "")
