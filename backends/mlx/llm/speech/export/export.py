"""`export_speech`: a Hugging Face speech model → a `.pte`. docs/speech.md describes the file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, PreTrainedModel

from ....workarounds.program_caches import forget_programs
from ...export.checkpoints.checkpoint import Checkpoint
from ...export.checkpoints.checks import check_float8, check_loaded, check_quantization
from ...export.checkpoints.hf import HFFolder, read_json
from ...export.checkpoints.open import find_checkpoint, open_checkpoint, opened
from ...export.checkpoints.tokenizer import check_tokenizer
from ...export.exported import ExportedLLM
from ...export.lowering import lower
from ...export.quantization.conversion import convert_weights
from ...export.serialize import serialize
from ...export_options import SPEECH, ExportOptions
from .check import check_program
from .decoder import ProgramModel
from .families import FAMILIES, Family
from .metadata import alignment_heads, metadata, prompt_config
from .methods import export_methods

CHUNK = 512  # the largest number of tokens in one call


def is_speech(model: str | Path | Checkpoint) -> bool:
    """Whether `model`, a folder or a hub id, is a speech model that `export_speech` knows, by its `config.json`."""
    try:
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(find_checkpoint(model))
    except (OSError, ValueError):
        return False
    return checkpoint.model_type in FAMILIES


@forget_programs()
def export_speech(
    model: str | Path | Checkpoint | PreTrainedModel,
    *,
    tokenizer: Any = None,
    feature_extractor: Any = None,
    progress: Callable[[str], Any] = lambda step: None,
    **options: Any,
) -> ExportedLLM:
    """Export `model`, a checkpoint folder, a hub id or a loaded model: Whisper, Moonshine or Moonshine Streaming.

    The program takes samples at 16 kHz and returns tokens. A loaded `model` is changed in place. Features are computed
    in float32.

    - `tokenizer`, `feature_extractor`: by default those of the checkpoint folder. A loaded model has no default.
      Whisper without a feature extractor gets that of OpenAI's models.
    - `progress`: called with the name of each long step before it begins.
    - `options`: those fields of `ExportOptions` that a speech model takes.

    Raises ValueError, with the name of the argument in the message.
    """
    settings = ExportOptions.of("export_speech", SPEECH, options)
    check_tokenizer(tokenizer, "export_speech")
    head = replace(settings.head, allowed_tokens=True)
    progress("load")
    model, tokenizer, extractor, dtype, notes = _load(model, tokenizer, feature_extractor, settings.torch_dtype)
    family = _family(model, extractor, settings.max_seconds)
    prompt = prompt_config(model)
    if prompt["no_speech"] is not None:  # the rule for windows without speech needs log probabilities
        head = replace(head, logprobs=max(1, head.logprobs))
    conversion = convert_weights(
        model, settings.quantize, settings.group_size, dtype, tokenizer=None, calibrate=None, progress=progress
    )
    length = _context_len(model, settings.max_context_len)
    timestamp_begin = _add_timestamps(prompt, family)
    program_model = ProgramModel(
        model,
        family,
        max_context_len=length,
        chunk=CHUNK,
        dtype=dtype,
        timestamp_begin=timestamp_begin,
        alignment_heads=alignment_heads(model),
    ).eval()
    progress("export")
    methods = export_methods(program_model, head)
    constants = metadata(program_model, tokenizer, head, prompt)
    progress("lower")
    lowered, report = lower(
        methods, constants, allow_extensions=settings.allow_extensions, weights=settings.weights_file
    )
    progress("serialize")
    program = serialize(lowered)
    checker = None
    if settings.verify:
        checker = functools.partial(check_program, program_model=program_model, head=head, start_token=prompt["start"])
    return ExportedLLM(
        program,
        report,
        constants,
        tuple(methods),
        program_model.cache_bytes,
        tuple(conversion.unquantized),  # type: ignore[arg-type]
        notes=tuple(notes),
        _checker=checker,
    )


def _load(
    model: str | Path | Checkpoint | PreTrainedModel, tokenizer: Any, extractor: Any, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, Any, Any, torch.dtype, list[str]]:
    if isinstance(model, PreTrainedModel):
        return model.eval().requires_grad_(False), tokenizer, extractor, dtype or model.dtype, []
    checkpoint = opened(model, "export_speech")
    if not is_speech(checkpoint):
        raise ValueError(f"export_speech: model: {checkpoint.path}: got another model, expected {', '.join(FAMILIES)}")
    if extractor is None and _has_extractor(checkpoint.path):
        extractor = AutoFeatureExtractor.from_pretrained(checkpoint.path)
    loaded = _load_folder(checkpoint).eval().requires_grad_(False)  # type: ignore[arg-type]
    return loaded, tokenizer or checkpoint.tokenizer(), extractor, dtype or torch.float32, checkpoint.notes


def _has_extractor(folder: Path) -> bool:
    """Whether `folder` has the settings of a feature extractor: in a file of their own, or in that of the processor."""
    if (folder / "preprocessor_config.json").is_file():
        return True
    path = folder / "processor_config.json"
    return path.is_file() and "feature_extractor" in _read(path)


def _load_folder(checkpoint: HFFolder) -> PreTrainedModel:
    where, folder = f"export_speech: model: {checkpoint.path}", checkpoint.path
    try:
        check_quantization(checkpoint.quantization, where)
        check_float8(folder, checkpoint.quantization, where)
        model, info = AutoModelForSpeechSeq2Seq.from_pretrained(
            folder, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (SafetensorError, OSError, ImportError) as error:
        raise ValueError(f"{where}: {error}") from error
    check_loaded(model, info, where)
    _complete_generation_config(model, folder)
    return model


def _complete_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Add the values of `generation_config.json` that transformers does not read: those that only Whisper has."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    for name, value in _read(path).items():
        if getattr(model.generation_config, name, None) is None:
            setattr(model.generation_config, name, value)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"export_speech: model: {error}") from error


def _family(model: PreTrainedModel, extractor: Any, seconds: float) -> Family:
    kind = model.config.model_type
    if kind not in FAMILIES or not hasattr(model, "proj_out"):
        raise ValueError(
            f"export_speech: model: got {type(model).__name__}, expected a model for conditional generation of "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[kind](model, extractor, seconds)


def _context_len(model: PreTrainedModel, max_context_len: int | None) -> int:
    config = model.config
    limit = config.max_target_positions if config.model_type == "whisper" else config.max_position_embeddings
    length = limit if max_context_len is None else max_context_len
    if not 2 <= length <= limit:
        raise ValueError(f"export_speech: max_context_len: got {length}, expected 2 to {limit}")
    return length


def _add_timestamps(prompt: dict[str, Any], family: Family) -> int | None:
    """Add the fields about timestamps to `prompt`, a `prompt_config`. Return the first timestamp token, or None."""
    begin = None if prompt["no_timestamps"] is None else prompt["no_timestamps"] + 1
    if begin == family.model.config.vocab_size:
        begin = None  # the vocabulary has no timestamps
    prompt["timestamp_begin"] = begin
    seconds = family.max_samples / family.max_states() / 16000  # of a state: Whisper has one timestamp for each
    prompt["seconds_per_timestamp"] = seconds if family.has_fixed_length else None
    return begin
