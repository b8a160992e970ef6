"""`export_llm`: a Hugging Face causal language model → a `.pte`. docs/llm-program.md describes the file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_layers import MtpModel

from ...preprocess import NotPortable
from ...workarounds.program_caches import forget_programs
from ..tokenizer import has_tokenizer, has_words, reading_tokenizer, template_in
from .check import check_program
from .checkpoints.adapter import merge_adapter
from .checkpoints.load_checks import reading
from .context_len import default_context_len, position_limit
from .decoder import CachedDecoder
from .experts import use_gathered_experts
from .exported import ExportedLLM
from .head_config import HeadConfig
from .lowering import lower
from .metadata import metadata
from .methods import OUTPUTS, export_methods, method_kinds
from .mtp import UnknownHead, load_mtp
from .packed import set_int8_activations
from .quantization.conversion import GROUPED, QUANTIZATIONS, convert_mtp, convert_weights
from .quantization.kv_caches import KV_BITS, KVQuantization, half_precision, quantize_caches
from .quantize import GROUP_SIZES
from .reference import Reference
from .serialize import serialize
from .weights import compute_dtype, find_checkpoint, is_gguf, is_mlx, load_causal_lm, open_gguf

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ACTIVATIONS = ("float", "int8")
CHUNK = 2048  # for GPUs; on a CPU, the engine feeds smaller chunks
WINDOW_CHUNK = 512  # for models with sliding windows, whose ring buffers grow with the chunk


@forget_programs()
def export_llm(
    model: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    adapter: str | Path | None = None,
    dtype: torch.dtype | None = None,
    quantize: str = "none",
    group_size: int | None = None,
    calibrate: str | Path | None = None,
    activations: str = "float",
    max_context_len: int | None = None,
    chunk: int | None = None,
    sliding_window: str | int = "auto",
    batch: int = 1,
    kv_bits: int | None = None,
    outputs: str = "tokens",
    speculation: bool = True,
    head: HeadConfig = HeadConfig(),
    allow_extensions: bool = False,
    portable: bool = False,
    verify: bool = True,
    progress: Callable[[str], Any] = lambda step: None,
) -> ExportedLLM:
    """Export `model`, a checkpoint folder, a GGUF file, a hub id or a loaded model, as a program for MLX.

    A loaded `model` is changed in place: its attention is replaced and, with `quantize`, its weights
    are quantized. Weights that are quantized in an mlx-lm folder or a GGUF file, and linear layers with
    torchao's NVFP4 or MX weights, keep their format.

    - `tokenizer`: the tokenizer to store in the program; by default that of the adapter, if its folder has one, or of
      the checkpoint.
    - `adapter`: a folder of `peft` or mlx-lm with a LoRA adapter to merge into the weights.
    - `dtype`: the dtype of the weights and of the computation; by default float32, or the dtype of a
      loaded model.
    - `quantize`: `int4` or `int8` in groups of `group_size` (32, 64 or 128; by default 32); `mixed`, which
      has 4 bits but keeps sensitive layers wider; `nvfp4`, `mxfp4` or `mxfp8`; or `none`. The embedding
      and the output projection get 8 bits.
    - `calibrate`: a text file. With `int4`, `int8` or `mixed`, the layers are tuned, one after the other, to their
      inputs on this text. By default, no layer is tuned. Below 8 bits, the quantization then weights its errors by the
      inputs on a part of Python's documentation.
    - `activations`: `float`; or `int8`: the linear layers with affine weights of 4 or 8 bits round their inputs to
      8 bits. Use `allow_extensions` as well: a kernel for Linux CPUs then multiplies the integers.
    - `max_context_len`: capacity of the KV caches in positions; by default the limit of the model,
      but at most 4096. If attention chooses keys with an index, the limit is the number of keys that it chooses.
    - `chunk`: the largest number of tokens in one call; by default 2048, or 512 for a model with sliding windows.
      Runners split longer prompts. The engine feeds at most 512 tokens in a call on a CPU.
    - `sliding_window`: `auto` follows the config of the model; a number is the window of every
      layer in positions, where 0 stands for no window.
    - `batch`: number of rows of the KV caches: the sequences that the program can decode side by side.
    - `kv_bits`: 8 or 4 for quantized KV caches, or 16 for float16 in place of float32. By default, the caches have the
      dtype of the model.
    - `outputs`: `tokens`; `logits`; or `both`, as several methods.
    - `speculation`: whether a program that returns tokens has the method `verify`, which checks draft tokens.
    - `head`: the sampling parameters that the program takes as inputs.
    - `allow_extensions`: use IR nodes that ExecuTorch's own MLX delegate lacks. That delegate then
      cannot run the program.
    - `portable`: make a program that gives the same values on ExecuTorch's own MLX delegate. It has a single method,
      `forward`, and one row, because methods share no caches there; `speculation` has no effect. What that delegate
      would compute differently is an error.
    - `verify`: whether `save` compares the finished file with the eager model. The model stays in memory until then.
    - `progress`: called with the name of each long step before it begins.

    Raises ValueError, with the name of the argument in the message.
    """
    _check_arguments(quantize, group_size, calibrate, activations, chunk, sliding_window, batch, kv_bits, outputs, head)
    if portable:
        _check_portable(batch=batch, outputs=outputs, allow_extensions=allow_extensions)
    check_tokenizer(tokenizer)
    progress("load")
    speculation = speculation and not portable
    uses_mtp = speculation and outputs != "logits" and kv_bits in (16, None)
    if adapter is not None and tokenizer is None and not isinstance(model, PreTrainedModel):
        tokenizer = load_tokenizer(Path(adapter))
    model, mtp, tokenizer, dtype, notes = _load(model, tokenizer, dtype, quantize, uses_mtp)
    if adapter is not None:
        progress("merge the adapter")
        model = merge_adapter(model, adapter, dtype or compute_dtype(model))
    use_gathered_experts(model)
    conversion = convert_weights(
        model, quantize, group_size, dtype, tokenizer=tokenizer,
        calibrate=None if calibrate is None else Path(calibrate), activations=activations, progress=progress,
    )  # fmt: skip
    if mtp is not None:
        convert_mtp(use_gathered_experts(mtp), quantize, group_size, dtype, compute_dtype(model))
    max_context_len = _context_len(model, max_context_len, head)
    reference = Reference.of(model, max_context_len) if verify and sliding_window == "auto" else None
    make_decoder = functools.partial(
        CachedDecoder, model, rows=batch, max_context_len=max_context_len, chunk=chunk or CHUNK, window=sliding_window,
        ring_chunk=None if chunk else WINDOW_CHUNK, mtp=mtp,
        logs_states=speculation and outputs != "logits",
    )  # fmt: skip
    decoder, kv_quantization = _decoder_to_export(make_decoder, reference, activations, kv_bits, tokenizer, progress)
    progress("export")
    has_head = outputs != "logits"
    head = head if has_head else HeadConfig.minimal()
    # If draft tokens cannot be verified, the method `verify` can still return the log probabilities of given tokens.
    has_verify = speculation and (head.logprobs > 0 or decoder.can_verify_drafts)
    if mtp is not None and decoder.mtp is None:
        notes.append("left out the head for multi-token prediction: the states of the model cannot be rewound")
    kinds = method_kinds(outputs, batch, has_verify, draft=decoder.mtp is not None, rewind=decoder.can_rewind)
    methods = export_methods(decoder, kinds, head)
    constants = metadata(decoder, tokenizer, head, has_head=has_head)
    progress("lower")
    try:
        lowered, report = lower(methods, constants, allow_extensions=allow_extensions, portable=portable)
    except NotPortable as error:
        raise ValueError(f"export_llm: portable: {type(model).__name__} cannot be portable:\n{error}") from error
    progress("serialize")
    program = serialize(lowered, portable=portable)
    checker = None
    if verify:
        checker = functools.partial(check_program, program=program, decoder=decoder, kinds=kinds, head=head)
    return ExportedLLM(
        program, report, constants, tuple(methods), decoder.bytes, tuple(decoder.cache.numbers_per_token),
        tuple(conversion.unquantized), conversion.perplexity, tuple(notes), kv_quantization, _checker=checker,
    )


def _decoder_to_export(
    make_decoder: Callable[..., CachedDecoder], reference: Reference | None, activations: str, kv_bits: int | None,
    tokenizer: Any, progress: Callable[[str], Any],
) -> tuple[CachedDecoder, KVQuantization | None]:
    """Return the decoder to export, and what quantized KV caches change, or None if they are not quantized.

    `make_decoder` makes a decoder. Its argument `specs` describes the caches; by default, they have the dtype of the
    model. `reference` is compared with a decoder before activations and caches are rounded to fewer bits.
    """
    decoder = make_decoder()
    if reference is not None:
        reference.check(decoder)
    if activations == "int8" and not set_int8_activations(decoder.model, True):
        raise ValueError("export_llm: activations: got int8, expected linear layers with affine weights of 4 or 8 bits")
    if kv_bits is None:
        return decoder, None
    if kv_bits == 16:
        return make_decoder(specs=half_precision(decoder)), None
    progress(f"quantize the KV caches to {kv_bits} bits")
    specs, quantization = quantize_caches(decoder, kv_bits, tokenizer)
    return make_decoder(specs=specs), quantization


def _check_arguments(
    quantize, group_size, calibrate, activations, chunk, sliding_window, batch, kv_bits, outputs, head: HeadConfig
) -> None:
    check_choice("quantize", quantize, QUANTIZATIONS)
    check_choice("activations", activations, ACTIVATIONS)
    if kv_bits is not None:
        check_choice("kv_bits", kv_bits, KV_BITS)
    check_choice("outputs", outputs, OUTPUTS)
    check_group_size(group_size, quantize)
    if calibrate is not None and quantize == "none":
        raise ValueError("export_llm: calibrate: expected a quantization as well")
    for name, value, minimum in (("batch", batch, 1), ("chunk", chunk, 2)):
        if value is not None and value < minimum:
            raise ValueError(f"export_llm: {name}: got {value}, expected at least {minimum}")
    if outputs == "logits" and (processors := head.logits_processors() + (["logprobs"] if head.logprobs else [])):
        raise ValueError(
            f"export_llm: head.{processors[0]}: got {getattr(head, processors[0])} with outputs 'logits', expected "
            "outputs 'tokens' or 'both'; a program that returns logits supports it on the host"
        )
    if sliding_window != "auto" and not (isinstance(sliding_window, int) and sliding_window >= 0):
        raise ValueError(f"export_llm: sliding_window: got {sliding_window}, expected 'auto' or a number of positions")


# What a portable program can have, and why it can have nothing else.
_ONE_METHOD = "a portable program has one method, because methods share no caches on ExecuTorch's own MLX delegate"
_PORTABLE = {
    "batch": ((1,), "a portable program answers one request at a time"),
    "outputs": (("tokens", "logits"), _ONE_METHOD),
    "allow_extensions": ((False,), "ExecuTorch's own MLX delegate lacks these IR nodes"),
}


def _check_portable(**arguments: Any) -> None:
    """Raise ValueError if a portable program cannot have one of the `arguments` of `export_llm`."""
    for name, value in arguments.items():
        expected, reason = _PORTABLE[name]
        if value not in expected:
            choices = " or ".join(map(str, expected))
            raise ValueError(f"export_llm: {name}: got {value} with portable, expected {choices}: {reason}")


def check_choice(name: str, value: Any, choices: Collection, function: str = "export_llm") -> None:
    if value not in choices:
        raise ValueError(f"{function}: {name}: got {value}, expected {', '.join(map(str, choices))}")


def check_group_size(group_size: int | None, quantize: str, function: str = "export_llm") -> None:
    if group_size is None:
        return
    check_choice("group_size", group_size, GROUP_SIZES, function)
    if quantize not in GROUPED:
        raise ValueError(f"{function}: group_size: got {group_size} with {quantize}, expected quantize int4 or int8")


def _load(
    model: str | Path | PreTrainedModel, tokenizer: Any, dtype: torch.dtype | None, quantize: str, uses_mtp: bool
) -> tuple[PreTrainedModel, MtpModel | None, Any, torch.dtype | None, list[str]]:
    """Return the model with frozen weights, its head for multi-token prediction, its tokenizer, a dtype, and notes.

    The dtype is the one to cast the weights to, or None if they keep theirs. The notes are about the weights. The head
    is None if `uses_mtp` is false, if a Hugging Face checkpoint has none, and for all other kinds of checkpoints. It is
    also None, with a note, if its layout is unknown.
    """
    mtp, notes = None, []
    if not isinstance(model, PreTrainedModel):
        try:
            path = find_checkpoint(model)
        except ValueError as error:
            raise ValueError(f"export_llm: model: {error}") from error
        dtype = dtype or torch.float32
        with reading(path):
            if is_gguf(path):
                model, tokenizer, notes = _load_gguf(path, tokenizer)
            else:
                # To be quantized, weights keep the precision of the checkpoint. Else none is larger than it has to be.
                cast_to = dtype if quantize == "none" else None
                model, mtp, tokenizer, notes = _load_folder(path, tokenizer, cast_to, uses_mtp)
    return model.eval().requires_grad_(False), mtp, tokenizer, dtype, notes


def _load_gguf(path: Path, tokenizer: Any) -> tuple[PreTrainedModel, Any, list[str]]:
    file = open_gguf(path)
    return file.load(), tokenizer or file.tokenizer(), file.notes


def _load_folder(
    folder: Path, tokenizer: Any, dtype: torch.dtype | None, uses_mtp: bool
) -> tuple[PreTrainedModel, MtpModel | None, Any, list[str]]:
    notes = []
    tokenizer = tokenizer or load_tokenizer(folder)
    if tokenizer is None:
        notes.append(f"{folder} has no tokenizer: prompts and answers of the program are token ids")
    model, mtp = load_causal_lm(folder, dtype=dtype), None
    if uses_mtp and not is_mlx(folder):
        try:
            mtp = load_mtp(model, folder)
        except UnknownHead as reason:
            notes.append(f"left out the head for multi-token prediction: {reason}")
    return model, mtp, tokenizer, notes


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in `folder`, or None if the folder has none."""
    if not has_tokenizer(folder):
        return None
    with reading_tokenizer(f"export_llm: tokenizer: cannot read the one in {folder}"):
        tokenizer = _read_tokenizer(folder)
        tokenizer.chat_template = tokenizer.chat_template or template_in(folder)
    check_tokenizer(tokenizer)
    if not has_words(tokenizer.backend_tokenizer, tokenizer.all_special_ids):
        raise ValueError(f"export_llm: tokenizer: {folder} lacks the file of its tokens, such as tokenizer.json")
    return tokenizer


def _read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in `folder`, without running code in the folder.

    If its class is in such code, or uses mistral-common, it is that of `tokenizer.json`, if the folder has this file.
    """
    has_file = (folder / "tokenizer.json").is_file()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError:
        if not has_file:
            raise
        tokenizer = None
    if has_file and not hasattr(tokenizer, "backend_tokenizer"):
        return PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def check_tokenizer(tokenizer: Any, function: str = "export_llm") -> None:
    """Raise ValueError unless `tokenizer` is None or can be stored in a program."""
    if tokenizer is not None and not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"{function}: tokenizer: got {type(tokenizer).__name__}, expected one of the package tokenizers, with a "
            "tokenizer.json"
        )


def _context_len(model: PreTrainedModel, max_context_len: int | None, head: HeadConfig) -> int:
    """Return the capacity of the caches. Raises ValueError if the capacity does not fit the model or the head."""
    limit = position_limit(model.config.get_text_config())
    length = default_context_len(model) if max_context_len is None else max_context_len
    if not 2 <= length <= limit:
        raise ValueError(f"export_llm: max_context_len: got {length}, expected 2 to {limit}")
    if head.penalties > length:
        raise ValueError(f"export_llm: head.penalties: got {head.penalties}, expected at most {length}")
    return length
