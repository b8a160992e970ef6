"""What a program says of itself, by ExecuTorch's names: see docs/llm-program.md."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .decoder import CachedDecoder
from .parameters import Sampling
from .tokens import token_table

TOKENIZER_FILES = {"tokenizer_json": "tokenizer.json", "tokenizer_config": "tokenizer_config.json"}


def metadata(
    model: PreTrainedModel,
    tokenizer: Any,
    decoder: CachedDecoder,
    chunk: int,
    sampling: Sampling,
    *,
    head: bool,
) -> dict[str, Any]:
    """The constant methods of the program, name → value."""
    config = model.config.get_text_config()
    bos = config.bos_token_id
    constants = {
        "get_max_seq_len": chunk,
        "get_max_context_len": decoder.max_seq_len,
        "get_max_batch_size": decoder.batch,
        "get_max_rewind": chunk - 1 if decoder.cache.slides else decoder.max_seq_len,
        "get_vocab_size": config.vocab_size,
        "get_bos_id": -1 if bos is None else bos,
        "get_eos_ids": _end_ids(model),
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "sampling_head": head,
    }
    constants |= sampling.metadata()
    if tokenizer is not None:
        table = token_table(tokenizer, config.vocab_size)
        constants |= zip(("token_bytes", "token_offsets"), table)
        constants |= _tokenizer_files(tokenizer)
    return constants


def _end_ids(model: PreTrainedModel) -> list[int]:
    """Every id that ends a text: the generation config names those of chats as well."""
    ids: set[int] = set()
    for config in (model.config.get_text_config(), getattr(model, "generation_config", None)):
        found = getattr(config, "eos_token_id", None)
        ids |= set(found if isinstance(found, list) else [] if found is None else [found])
    return sorted(ids)


def _tokenizer_files(tokenizer: Any) -> dict[str, torch.Tensor]:
    """The tokenizer itself, so that one file is all it takes to chat."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder, save_jinja_files=False)
        files = {name: Path(folder) / file for name, file in TOKENIZER_FILES.items()}
        return {
            name: torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
            for name, file in files.items()
            if file.is_file()
        }
