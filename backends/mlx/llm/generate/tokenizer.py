"""Loads and calls the tokenizer of a program, which is in the program's file or in a Hugging Face folder."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .program import LLMProgram

# Metadata method → name of the file whose contents it returns.
FILES = {"tokenizer_json": "tokenizer.json", "tokenizer_config": "tokenizer_config.json"}


def load_tokenizer(program: LLMProgram, folder: str | Path | None = None) -> Any:
    """Load and return the tokenizer in `folder` or, by default, the one in the program.

    Returns None if `folder` is None and the program has no tokenizer. Raises ValueError if the folder has
    no tokenizer.
    """
    if folder is not None:
        from transformers import AutoTokenizer

        if not any(Path(folder).glob("tokenizer*")):
            raise ValueError(f"tokenizer: {folder} has no tokenizer.json")
        return AutoTokenizer.from_pretrained(folder)
    if "tokenizer_json" not in program.metadata:
        return None
    # AutoTokenizer would look for a class that belongs to the type of the model. None is needed here.
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as files:
        for name, file in FILES.items():
            data = program.get(name)
            content = b"{}" if data is None else data.numpy().tobytes()
            (Path(files) / file).write_bytes(content)
        return PreTrainedTokenizerFast.from_pretrained(files)


def eos_ids(tokenizer: Any, folder: str | Path | None = None) -> set[int]:
    """Return the token ids that end a text, from the tokenizer and from the generation config in `folder`, if any."""
    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    config = None if folder is None else Path(folder) / "generation_config.json"
    if config is not None and config.is_file():
        found = json.loads(config.read_text()).get("eos_token_id")
        ids |= set(found if isinstance(found, list) else [] if found is None else [found])
    return ids


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Return the token ids of `text`. `special` adds the special tokens that the model expects around a text."""
    # verbose=False suppresses a warning about long texts. The caller checks the length against the context.
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] = {}
) -> list[int]:
    """Return the token ids of a chat, up to the beginning of the answer. `options` are template variables.

    Raises ValueError if there is no chat template, if the template rejects the messages, or if a name in
    `options` is reserved.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; pass the prompt as text")
    render = tokenizer.apply_chat_template
    if reserved := sorted(options.keys() & inspect.signature(render).parameters.keys()):
        raise ValueError(
            f"template_options: {reserved[0]} is reserved, expected variables of the template"
        )
    try:
        text = render(list(messages), tokenize=False, add_generation_prompt=True, **options)
    except TemplateError as error:
        raise ValueError(f"messages: the chat template rejected them: {error}") from error
    return encode(tokenizer, text, special=False)
