"""Predicts what an export of a checkpoint would give, from its `config.json` or GGUF header. No weights are read."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributions import Distribution
from transformers import PreTrainedModel

from .attention.cache import LayerSpec
from .checkpoints.language_part import remove_other_media
from .checkpoints.open import open_checkpoint
from .context_len import default_context_len
from .decoder import CachedDecoder
from .experts import use_gathered_experts


@dataclass(frozen=True)
class Survey:
    """What `survey` found out.

    - `architecture`: the class of the model in `transformers`.
    - `parameters`: the number of its parameters.
    - `layers`: a description of each kind of layer that keeps keys and values → the number of such layers.
    - `numbers_per_token`: the number of numbers that the caches of all layers together keep for a token.
    - `obstacle`: what keeps the model from being exported, or None.
    """

    architecture: str
    parameters: int | None = None
    layers: dict[str, int] | None = None
    numbers_per_token: int | None = None
    obstacle: str | None = None


def survey(path: str | Path) -> Survey:
    """Examine the model whose `config.json` is in a folder, or that is in a GGUF file.

    The model is built on the device `meta`: it runs on a few tokens, but has no memory for values and computes none.

    Raises ValueError if there is no valid `config.json`, and if the file is no GGUF file of a known architecture.
    """
    try:
        checkpoint = open_checkpoint(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"survey: {error}") from error
    try:
        model = checkpoint.empty_model().eval().requires_grad_(False)
    except ValueError as error:
        return Survey(checkpoint.architecture, obstacle=str(error))
    remove_other_media(model)
    known = Survey(type(model).__name__, sum(p.numel() for p in model.parameters()))
    try:
        checkpoint.check()
        use_gathered_experts(model)
        with torch.device("meta"), _without_checks_of_values():
            decoder = CachedDecoder(model, max_context_len=default_context_len(model), chunk=2)
    except ValueError as error:
        return Survey(known.architecture, known.parameters, obstacle=str(error))
    specs = [spec for spec in decoder.specs if spec is not None]
    kinds = collections.Counter(_description(spec) for spec in specs)
    return Survey(known.architecture, known.parameters, dict(kinds), sum(decoder.cache.numbers_per_token))


@contextmanager
def _without_checks_of_values() -> Iterator[None]:
    """Within the context, models check no values, because tensors on `meta` have none.

    Gemma 3n has distributions, which check their arguments, and GPT-2 looks for padding in its tokens.
    """
    checks, warn = Distribution._validate_args, PreTrainedModel.warn_if_padding_and_no_attention_mask
    Distribution.set_default_validate_args(False)
    PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *arguments: None
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)
        PreTrainedModel.warn_if_padding_and_no_attention_mask = warn


def _description(spec: LayerSpec) -> str:
    heads, size = spec.keys
    if spec.values is None:
        parts = [f"latent attention, {size} numbers per token"]
    else:
        numbers = heads * size + spec.values[0] * spec.values[1]
        parts = [f"attention with {heads} key heads of {size}, {numbers} numbers per token"]
    if spec.span.window is not None:
        parts.append(f"{'blocks' if spec.span.blocks else 'a window'} of {spec.span.window} positions")
    if spec.slopes is not None:
        parts.append("linear biases")
    if spec.has_sinks:
        parts.append("attention sinks")
    return ", ".join(parts)
