"""The tokenizer of a program: the one in the file, or a folder of Hugging Face's."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .program import LLMProgram

FILES = {"tokenizer_json": "tokenizer.json", "tokenizer_config": "tokenizer_config.json"}


def load_tokenizer(program: LLMProgram, folder: str | Path | None = None) -> Any:
    """That of `folder` if there is one, else that of the program, else None.

    Raises ValueError for a folder without a tokenizer.
    """
    if folder is not None:
        from transformers import AutoTokenizer

        if not any(Path(folder).glob("tokenizer*")):
            raise ValueError(f"tokenizer: {folder} has no tokenizer.json")
        return AutoTokenizer.from_pretrained(folder)
    if "tokenizer_json" not in program.metadata:
        return None
    # The file holds the whole of it; AutoTokenizer would only look for a class by the model's name.
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as place:
        for name, file in FILES.items():
            data = program.get(name)
            text = b"{}" if data is None else data.numpy().tobytes()
            (Path(place) / file).write_bytes(text)
        return PreTrainedTokenizerFast.from_pretrained(place)


def end_ids(tokenizer: Any, folder: str | Path | None = None) -> set[int]:
    """The ids that end a text by the tokenizer, and by the generation config in its folder."""
    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    config = None if folder is None else Path(folder) / "generation_config.json"
    if config is not None and config.is_file():
        found = json.loads(config.read_text()).get("eos_token_id")
        ids |= set(found if isinstance(found, list) else [] if found is None else [found])
    return ids


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """The ids of `text`; `special`: with those that the model expects around it."""
    # Not verbose: it would warn of the length that the context is checked for.
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] = {}
) -> list[int]:
    """The ids of a chat up to where the answer begins; `options` are variables of the template.

    Raises ValueError if there is no template, or it refuses the messages.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give the prompt as text")
    render = tokenizer.apply_chat_template
    if taken := sorted(options.keys() & inspect.signature(render).parameters.keys()):
        raise ValueError(f"template_options: {taken[0]} is no variable of a template")
    try:
        text = render(list(messages), tokenize=False, add_generation_prompt=True, **options)
    except TemplateError as error:
        raise ValueError(f"messages: the chat template refuses them: {error}") from error
    return encode(tokenizer, text, special=False)
