"""`export_llm`: a Hugging Face causal language model → a `.pte`. docs/llm-program.md describes the file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from ...preprocess import NotPortable
from ...workarounds.program_caches import forget_programs
from ..export_options import OPTIONS, TEXT, ExportOptions, HeadConfig
from .adapters import AdapterSlots
from .check import ProgramCheck, check_program
from .checkpoints.adapter import is_for_whole, merge_adapter
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.checks import reading
from .checkpoints.hf import HFFolder
from .checkpoints.language_part import load_config, other_media, without_other_media
from .checkpoints.open import opened
from .checkpoints.tokenizer import check_tokenizer, load_tokenizer
from .context_len import SMALL, default_context_len, position_limit
from .decoder import CachedDecoder
from .experts import use_gathered_experts
from .exported import ExportedLLM
from .lowering import lower
from .metadata import metadata
from .methods import export_methods, method_kinds
from .packed import set_int8_activations
from .precision import cast_parameters, compute_dtype
from .quantization.conversion import convert_mtp, convert_weights
from .quantization.kv_caches import KVQuantization, half_precision, quantize_caches
from .reference import Reference
from .serialize import serialize
from .vision.families import NoPictures, find_family, has_pictures, picture_settings
from .vision.methods import TOKEN_EMBEDDING, Vision, check_encoder, export_token_embedding, export_vision

DTYPES = {name: getattr(torch, name) for name in OPTIONS["dtype"].choices}
CHUNK = 2048  # for GPUs; on a CPU, the engine feeds smaller chunks
WINDOW_CHUNK = 512  # for models with sliding windows, whose ring buffers grow with the chunk


@forget_programs()
def export_llm(
    model: str | Path | Checkpoint | PreTrainedModel,
    *,
    tokenizer: Any = None,
    progress: Callable[[str], Any] = lambda step: None,
    **options: Any,
) -> ExportedLLM:
    """Export `model`, a checkpoint folder, a GGUF file, a hub id or a loaded model, as a program for MLX.

    A loaded `model` is changed in place: its attention is replaced and, with `quantize`, its weights
    are quantized. Weights that are quantized in an mlx-lm folder or a GGUF file, and linear layers with
    torchao's NVFP4 or MX weights, keep their format.

    - `tokenizer`: the tokenizer to store in the program; by default that of the adapter, if its folder has one, or of
      the checkpoint.
    - `progress`: called with the name of each long step before it begins.
    - `options`: the fields of `ExportOptions`, such as `quantize="int4"`.

    Raises ValueError, with the name of the argument in the message.
    """
    settings = ExportOptions.of("export_llm", TEXT, options)
    check_tokenizer(tokenizer)
    progress("load")
    if settings.adapter is not None and tokenizer is None and not isinstance(model, PreTrainedModel):
        tokenizer = load_tokenizer(Path(settings.adapter))
    has_head = settings.outputs != "logits"
    head = settings.head if has_head else HeadConfig.minimal()
    speculation = settings.speculation and not settings.portable and has_head
    model, mtp, vision, tokenizer, dtype, notes = _load(model, tokenizer, settings, has_mtp=speculation)
    if settings.adapter is not None and vision is None:
        progress("merge the adapter")
        model = merge_adapter(model, settings.adapter, dtype or compute_dtype(model))
    use_gathered_experts(model)
    conversion = convert_weights(
        model,
        settings.quantize,
        settings.group_size,
        dtype,
        tokenizer=tokenizer,
        calibrate=None if settings.calibrate is None else Path(settings.calibrate),
        activations=settings.activations,
        progress=progress,
    )
    if mtp is not None:
        convert_mtp(use_gathered_experts(mtp), settings.quantize, settings.group_size, dtype, compute_dtype(model))
    max_context_len = _context_len(model, settings)
    compares = settings.verify and settings.sliding_window == "auto"
    reference = Reference.of(model, max_context_len) if compares else None
    adapters = None
    if settings.adapters:
        targets = settings.adapter_targets or ()
        adapters = AdapterSlots(model, settings.adapters, settings.lora_rank, targets, compute_dtype(model))
    make_decoder = functools.partial(
        CachedDecoder,
        model,
        rows=settings.batch,
        max_context_len=max_context_len,
        chunk=settings.chunk or CHUNK,
        window=settings.sliding_window,
        ring_chunk=None if settings.chunk else WINDOW_CHUNK,
        mtp=mtp,
        logs_states=speculation,
        adapters=adapters,
    )
    decoder, kv_quantization = _decoder_to_export(make_decoder, reference, settings, tokenizer, progress)
    if vision is not None:
        decoder.picture_attention, decoder.has_rope_offset = vision.attention, vision.has_rope_offset
        decoder.added_layers = vision.added_layers
    progress("export")
    # If draft tokens cannot be verified, the method `verify` can still return the log probabilities of given tokens.
    has_verify = speculation and (head.logprobs > 0 or decoder.can_verify_drafts)
    if mtp is not None and decoder.mtp is None:
        notes.append("left out the head for multi-token prediction: the states of the model cannot be rewound")
    kinds = method_kinds(
        settings.outputs,
        settings.batch,
        has_verify,
        draft=decoder.mtp is not None,
        rewind=decoder.can_rewind,
        adapters=adapters is not None,
        pictures=vision is not None,
        portable=settings.portable,
    )
    methods = export_methods(decoder, kinds, head)
    constants = metadata(decoder, tokenizer, head, has_head=has_head)
    if vision is not None:
        methods |= {vision.name: vision.encoder, TOKEN_EMBEDDING: export_token_embedding(decoder)}
        constants |= vision.metadata()
    progress("lower")
    try:
        lowered, report = lower(
            methods,
            constants,
            allow_extensions=settings.allow_extensions,
            portable=settings.portable,
            weights=settings.weights_file,
        )
    except NotPortable as error:
        raise ValueError(f"export_llm: portable: {type(model).__name__} cannot be portable:\n{error}") from error
    progress("serialize")
    program = serialize(lowered)
    checker = None
    if settings.verify:
        checker = functools.partial(_check, program=program, decoder=decoder, kinds=kinds, head=head, vision=vision)
    return ExportedLLM(
        program=program,
        report=report,
        metadata=constants,
        methods=tuple(methods),
        cache_bytes=decoder.bytes,
        cache_values_per_token=tuple(decoder.cache.numbers_per_token),
        unquantized=tuple(conversion.unquantized),
        perplexity=conversion.perplexity,
        notes=tuple(notes),
        kv_quantization=kv_quantization,
        _checker=checker,
    )


def _decoder_to_export(
    make_decoder: Callable[..., CachedDecoder],
    reference: Reference | None,
    settings: ExportOptions,
    tokenizer: Any,
    progress: Callable[[str], Any],
) -> tuple[CachedDecoder, KVQuantization | None]:
    """Return the decoder to export, and what quantized KV caches change, or None if they are not quantized.

    `make_decoder` makes a decoder. Its argument `specs` describes the caches; by default, they have the dtype of the
    model. `reference` is compared with a decoder before activations and caches are rounded to fewer bits.
    """
    decoder = make_decoder()
    if decoder.adapters is not None:
        decoder.adapters.settle()
    if reference is not None:
        reference.check(decoder)
    if settings.activations == "int8" and not set_int8_activations(decoder.model, True):
        raise ValueError("export_llm: activations: got int8, expected linear layers with affine weights of 4 or 8 bits")
    kv_bits = settings.kv_bits
    if kv_bits is None:
        return decoder, None
    if kv_bits == 16:
        return make_decoder(specs=half_precision(decoder)), None
    progress(f"quantize the KV caches to {kv_bits} bits")
    specs, quantization = quantize_caches(decoder, kv_bits, tokenizer)
    return make_decoder(specs=specs), quantization


def _load(
    model: str | Path | Checkpoint | PreTrainedModel, tokenizer: Any, settings: ExportOptions, has_mtp: bool
) -> tuple[PreTrainedModel, MtpModel | None, Vision | None, Any, torch.dtype | None, list[str]]:
    """Return the model with frozen weights, its head for multi-token prediction, pictures, tokenizer, dtype and notes.

    The dtype is the one to cast the weights to, or None if they keep theirs. The notes are those of the checkpoint.
    """
    mtp, vision, notes, dtype = None, None, [], settings.torch_dtype
    if not isinstance(model, PreTrainedModel):
        checkpoint = opened(model, "export_llm")
        dtype = dtype or torch.float32
        with reading(checkpoint.path):
            tokenizer = tokenizer or checkpoint.tokenizer()
            # To be quantized, weights keep the precision of the checkpoint. Else none is larger than it has to be.
            stored = dtype if settings.quantize == "none" else None
            loaded = _load_with_pictures(checkpoint, tokenizer, settings, stored, dtype)
            model, vision = (checkpoint.load(stored), None) if loaded is None else loaded
            if has_mtp and settings.kv_bits in (16, None):
                mtp = checkpoint.head(model)
        notes = checkpoint.notes
    return model.eval().requires_grad_(False), mtp, vision, tokenizer, dtype, notes


def _load_with_pictures(
    checkpoint: Checkpoint, tokenizer: Any, settings: ExportOptions, stored: torch.dtype | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, Vision] | None:
    """Return the language model of a model for text and pictures, and its pictures; or None without pictures.

    `stored` is the dtype of the weights of the language model, or None for that of the checkpoint, and `dtype` that of
    the encoder. Raises NoPictures if the settings ask for pictures, and the model cannot have them.
    """
    try:
        if settings.pictures is False or not (settings.pictures or has_pictures(checkpoint.path)):
            return None
        if type(checkpoint) is not HFFolder:
            raise NoPictures(f"pictures: got {type(checkpoint).__name__}, expected a folder that transformers reads")
        if settings.adapters:
            raise NoPictures("pictures: got adapters to load at run time, expected none")
        config = load_config(checkpoint.path)
        if settings.portable and find_family(config.model_type).attention(config) is not None:
            raise NoPictures(
                "pictures: a portable program has one method, where the tokens of pictures attend as text does"
            )
        family, picture = find_family(config.model_type), picture_settings(checkpoint.path, config, tokenizer)
        model = checkpoint.load_with_pictures(stored)
        changes_encoder = settings.adapter is not None and is_for_whole(model, settings.adapter)
        if changes_encoder:
            model = merge_adapter(model, settings.adapter, dtype)
        model.requires_grad_(False)
        for _, _, part in other_media(model):
            cast_parameters(part, dtype)
        vision = export_vision(model, family, picture)
    except NoPictures as reason:
        if settings.pictures:
            raise ValueError(f"export_llm: {reason}") from reason
        if has_pictures(checkpoint.path):
            checkpoint.notes.append(f"left out the pictures: {reason}")
        return None
    language = without_other_media(model)
    if settings.adapter is not None and not changes_encoder:
        language = merge_adapter(language, settings.adapter, dtype)
    return language, vision


def _check(path: Path, *, vision: Vision | None, **program: Any) -> ProgramCheck:
    """Compare the file `path` with the eager model, and its encoder of pictures with eager torch."""
    check = check_program(path, **program)
    if vision is None:
        return check
    of_encoder = check_encoder(path, vision)
    if of_encoder.ok:
        return check
    note = f"{vision.name}: the largest difference is {of_encoder.difference:.1e}, tolerance {of_encoder.tolerance:.1e}"
    return dataclasses.replace(check, values_ok=False, departure=note)


def _context_len(model: PreTrainedModel, settings: ExportOptions) -> int:
    """Return the capacity of the caches. Raises ValueError if the capacity does not fit the model or the head."""
    limit = position_limit(model.config.get_text_config())
    length = settings.max_context_len
    if length is None:
        bits = settings.kv_bits or 8 * compute_dtype(model).itemsize
        length = default_context_len(model, settings.batch, bits / 8)
        if settings.portable:  # ExecuTorch's own delegate takes the memory of all positions at load
            length = min(length, SMALL)
    if not 2 <= length <= limit:
        raise ValueError(f"export_llm: max_context_len: got {length}, expected 2 to {limit}")
    if settings.head.penalties > length:
        raise ValueError(f"export_llm: head.penalties: got {settings.head.penalties}, expected at most {length}")
    return length
