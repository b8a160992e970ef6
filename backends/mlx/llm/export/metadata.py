"""The metadata methods of a program. docs/llm-program.md lists them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..export_options import HeadConfig
from ..sampling_parameters import PENALTIES, SCALARS
from ..tokenizer import Tokenizer
from ..tokens import token_table
from .decoder import CachedDecoder

TOKENIZER_FILES = {"tokenizer_json": "tokenizer.json", "tokenizer_config": "tokenizer_config.json"}


def metadata(decoder: CachedDecoder, tokenizer: Any, head: HeadConfig, *, has_head: bool) -> dict[str, Any]:
    """Return the constant methods of the program, name → value. `tokenizer` may be None.

    `has_head` says whether a method of the program returns tokens.
    """
    config = decoder.model.config.get_text_config()
    bos = config.bos_token_id
    constants = {
        "get_max_seq_len": decoder.chunk,
        "get_max_context_len": decoder.max_context_len,
        "get_max_batch_size": decoder.rows,
        "get_max_rewind": _max_rewind(decoder),
        "get_vocab_size": config.vocab_size,
        "get_bos_id": -1 if bos is None else bos,
        "get_eos_ids": eos_ids(decoder.model),
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "sampling_head": has_head,
    }
    constants |= head.metadata() | {"sampling_adjusts": has_head and bool(head.logits_processors())}
    if (adapters := decoder.adapters) is not None:
        paths = "\n".join(layer.path for layer in adapters.layers)
        constants |= {"adapter_slots": adapters.slots, "adapter_rank": adapters.rank}
        constants["adapter_layers"] = _bytes(paths.encode())
    if defaults := sampling_defaults(decoder.model):
        constants["sampling_defaults"] = _bytes(json.dumps(defaults).encode())
    if tokenizer is not None:
        constants |= tokenizer_methods(tokenizer, config.vocab_size)
    return constants


def sampling_defaults(model: PreTrainedModel) -> dict[str, float]:
    """Return the sampling parameters that the authors of a model recommend in its generation config, name → value."""
    config = getattr(model, "generation_config", None)
    values = {name: getattr(config, name, None) for name in SCALARS if name != "seed"}
    given = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    do_sample = getattr(config, "do_sample", None)
    if do_sample is False:
        given["temperature"] = 0.0
    elif do_sample:
        given.setdefault("temperature", 1.0)
    if given.get("temperature") == 0:
        given = {name: value for name, value in given.items() if name in ("temperature", *PENALTIES)}
    defaults = {}
    for name, value in given.items():
        spec = SCALARS[name]
        is_valid = (spec.low is None or value >= spec.low) and (spec.high is None or value <= spec.high)
        if name == "temperature" or (is_valid and spec.is_on(value)):
            defaults[name] = spec.type(value)
    return defaults


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _max_rewind(decoder: CachedDecoder) -> int:
    if decoder.has_state:
        return 0
    # A ring buffer has place for `chunk - 1` positions besides its window.
    return decoder.chunk - 1 if decoder.cache.has_sliding_window else decoder.max_context_len


def eos_ids(model: PreTrainedModel) -> list[int]:
    """Return the stop ids of the model's config and of its generation config, which may add stop ids for chats."""
    ids: set[int] = set()
    for config in (model.config.get_text_config(), getattr(model, "generation_config", None)):
        eos = getattr(config, "eos_token_id", None)
        ids |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return sorted(ids)


def tokenizer_files(tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return the metadata methods with the files of a tokenizer of transformers."""
    with _saved(tokenizer) as folder:
        return _contents(folder)


def tokenizer_methods(tokenizer: Any, vocab_size: int, silent: Collection[int] = ()) -> dict[str, torch.Tensor]:
    """Return the metadata methods about a tokenizer of transformers: its files, and the bytes of the tokens.

    `silent` is as in `token_table`.
    """
    with _saved(tokenizer) as folder:
        table = token_table(Tokenizer.from_folder(folder), vocab_size, silent)
        return _contents(folder) | dict(zip(("token_bytes", "token_offsets"), table))


@contextmanager
def _saved(tokenizer: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder, save_jinja_files=False)
        yield Path(folder)


def _contents(folder: Path) -> dict[str, torch.Tensor]:
    files = {name: folder / file for name, file in TOKENIZER_FILES.items()}
    return {name: _bytes(file.read_bytes()) for name, file in files.items() if file.is_file()}
