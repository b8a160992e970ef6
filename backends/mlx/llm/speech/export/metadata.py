"""The metadata methods of a speech program. docs/speech.md lists them."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from ...export.metadata import eos_ids, tokenizer_methods
from ...export_options import HeadConfig
from .decoder import ProgramModel
from .families import SAMPLE_RATE

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
# The limit of Moonshine's answers, from its model card, per second of sound. Without a limit, some answers repeat
# themselves without end.
_MOONSHINE_TOKENS_PER_SECOND = 6.5


def prompt_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return how a prompt is composed, and how its answer is read.

    - `model_type`: that of the configuration, such as `whisper`;
    - `start`: the first token of the prompt;
    - `languages`: code of a language → token; empty if the model has one language only;
    - `names`: English name of a language → code;
    - `tasks`: name of a task → token; empty if the model has none;
    - `forced`: the tokens after `start`, for a model without languages;
    - `no_timestamps`: the token that asks for no timestamps, or None;
    - `no_speech`: the token whose probability after `start` is that of a window without speech, or None;
    - `previous`: the token that precedes text from before the window, or None;
    - `tokens_per_second`: the largest number of tokens of an answer per second of sound, or None;
    - `align`: whether the program has the method `align`.

    `export_speech` adds `timestamp_begin`, the first timestamp token, and `seconds_per_timestamp`, the time between one
    timestamp and the next. Both are None for a model without timestamps.

    Raises ValueError if the model has no start token.
    """
    config = model.config
    start = setting(model, "decoder_start_token_id")
    start = setting(model, "bos_token_id") if start is None else start
    if start is None:
        raise ValueError("export_speech: model: decoder_start_token_id: got none, expected a token")
    is_whisper = config.model_type == "whisper"
    languages, tasks, no_timestamps, no_speech, previous = {}, {}, None, None, None
    if is_whisper:
        no_timestamps = setting(model, "no_timestamps_token_id")
        no_speech = None if no_timestamps is None else no_timestamps - 1  # so in each vocabulary of Whisper
        previous = setting(model, "prev_sot_token_id")
        if setting(model, "is_multilingual", True):
            languages, tasks = setting(model, "lang_to_id", {}), setting(model, "task_to_id", {})
    tokens = {"no_timestamps_token_id": no_timestamps, "prev_sot_token_id": previous, **languages, **tasks}
    for name, token in tokens.items():
        if token is not None and not 0 < token < config.vocab_size:
            raise ValueError(f"export_speech: model: {name}: got {token}, expected a token in [1, {config.vocab_size})")
    codes = {_LANGUAGE.sub(r"\1", text): id for text, id in languages.items()}
    return {
        "model_type": config.model_type,
        "start": start,
        "languages": codes,
        "forced": [] if codes else _forced(model, no_timestamps),
        "names": {name: code for name, code in TO_LANGUAGE_CODE.items() if code in codes},
        "tasks": tasks,
        "no_timestamps": no_timestamps,
        "no_speech": no_speech,
        "previous": previous,
        "align": bool(alignment_heads(model)),
        "tokens_per_second": None if is_whisper else _MOONSHINE_TOKENS_PER_SECOND,
    }


def alignment_heads(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return the heads, as pairs of a layer and a head, whose attention tells when a word is said."""
    heads = setting(model, "alignment_heads") or ()
    return sorted((layer, head) for layer, head in heads) if model.config.model_type == "whisper" else []


def _forced(model: PreTrainedModel, no_timestamps: int | None) -> list[int]:
    """Return the tokens after the start token, as the old setting `forced_decoder_ids` lists them.

    The list leaves `no_timestamps` out.
    """
    pairs = dict(setting(model, "forced_decoder_ids") or ())
    tokens = []
    while (token := pairs.get(len(tokens) + 1)) is not None:
        tokens.append(token)
    return [token for token in tokens if token != no_timestamps]


def setting(model: PreTrainedModel, name: str, default: Any = None) -> Any:
    """Return a value of the generation config, or else of the model's config, or else `default`."""
    for config in (getattr(model, "generation_config", None), model.config):
        if (value := getattr(config, name, None)) is not None:
            return value
    return default


def metadata(program_model: ProgramModel, tokenizer: Any, head: HeadConfig, prompt: dict[str, Any]) -> dict[str, Any]:
    """Return the constant methods of the program, name → value. `tokenizer` may be None."""
    model, family = program_model.model, program_model.family
    bos = model.config.bos_token_id
    constants = {
        "get_max_seq_len": program_model.chunk,
        "get_max_context_len": program_model.max_context_len,
        "get_max_batch_size": 1,
        "get_max_rewind": program_model.max_context_len,
        "get_vocab_size": program_model.vocab_size,
        "get_bos_id": -1 if bos is None else bos,
        "get_eos_ids": eos_ids(model),
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "sampling_head": True,
        **head.metadata(),
        "speech_sample_rate": SAMPLE_RATE,
        "speech_min_samples": family.min_samples,
        "speech_max_samples": family.max_samples,
        "speech_sample_multiple": family.multiple,
        "speech_config": _bytes(json.dumps(prompt).encode()),
    }
    if program_model.timestamp_begin is not None:
        initial = setting(model, "max_initial_timestamp_index")
        constants["speech_timestamp_begin"] = program_model.timestamp_begin
        constants["speech_max_initial_timestamp"] = -1 if initial is None else initial
    for name, key in (("suppress_tokens", "speech_suppressed"), ("begin_suppress_tokens", "speech_suppressed_first")):
        tokens = sorted({token for token in setting(model, name) or () if 0 <= token < program_model.vocab_size})
        if tokens:
            constants[key] = torch.tensor(tokens)
    if tokenizer is not None:
        # Timestamps have no text. Whisper's tokenizer does not count them as special tokens.
        begin = program_model.timestamp_begin
        silent = () if begin is None else range(begin, program_model.vocab_size)
        constants |= tokenizer_methods(tokenizer, program_model.vocab_size, silent)
    return constants


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
