"""What an export of a language model chooses for what the command line leaves open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..llm.export_options import OPTIONS
from ..loader import cpu_kernels, load_delegate

if TYPE_CHECKING:
    from ..llm.export.checkpoints.checkpoint import Checkpoint

# For a program that returns only tokens and is not portable. docs/performance.md says what a row costs. The inputs of
# the head cost nothing in calls that do not use them.
BATCH = 4
HEAD = {"penalties": 256, "logit_bias": 300, "allowed_tokens": True, "logprobs": 20}
_TIGHT = 0.5  # the part of the memory from which on weights are large
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
_QUANTIZED_BITS = {"int8": 9, "int4": 5}  # with scales and biases, in groups of 32


def defaults(checkpoint: Checkpoint, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by name. `values` are those of the command line."""
    chosen: dict[str, Any] = {"dtype": _dtype(checkpoint, values)}
    if not values.get("portable") and values.get("outputs", "tokens") == "tokens":
        positions = (values.get("max_context_len"), _config(checkpoint).get("max_position_embeddings"))
        shortest = min((n for n in positions if isinstance(n, int) and n > 0), default=HEAD["penalties"])
        chosen |= {"batch": BATCH} | HEAD | {"penalties": min(HEAD["penalties"], shortest)}
    return {name: value for name, value in chosen.items() if name not in values and value != OPTIONS[name].default}


def memory_hint(checkpoint: Checkpoint, values: Mapping[str, Any]) -> str | None:
    """Return a line that suggests a quantization if the weights take a large part of the memory, else None."""
    stored = _stored_dtype(checkpoint)
    if values.get("quantize", "none") != "none" or stored not in _BITS:
        return None
    numbers = sum(path.stat().st_size for path in checkpoint.path.glob("*.safetensors")) * 8 / _BITS[stored]
    size = numbers * _BITS[str(values.get("dtype") or "float32")] / 8
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size < _TIGHT * memory:
        return None
    smaller = " or ".join(f"{numbers * bits / 8e9:.1f} GB with --quantize {n}" for n, bits in _QUANTIZED_BITS.items())
    return f"the weights take about {size / 1e9:.1f} GB of {memory / 1e9:.1f} GB of memory, or {smaller}"


def _dtype(checkpoint: Checkpoint, values: Mapping[str, Any]) -> str | None:
    """Return the dtype of the checkpoint if the device computes in it as fast as in float32, else None."""
    stored = _stored_dtype(checkpoint)
    if stored not in ("float16", "bfloat16") or values.get("portable"):
        return None
    delegate = load_delegate()  # before mlx is imported
    import mlx.core as mx

    if mx.default_device().type == mx.gpu:
        return stored
    # The kernels for CPUs read bfloat16 directly. Weights of fewer bits are read as fast in float32.
    has_kernels = cpu_kernels(delegate) not in ("", "portable")
    return stored if stored == "bfloat16" and has_kernels and values.get("quantize", "none") == "none" else None


def _stored_dtype(checkpoint: Checkpoint) -> str | None:
    config = _config(checkpoint)
    return config.get("dtype") or config.get("torch_dtype")


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config of the language model, or an empty dict for a checkpoint without `config.json`."""
    config = getattr(checkpoint, "config", {})
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config
