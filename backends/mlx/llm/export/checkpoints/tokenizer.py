"""Reads the tokenizer of a folder, as the export stores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ...tokenizer import has_tokenizer, has_words, reading_tokenizer, template_in


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
