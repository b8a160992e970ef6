"""Common parts of the commands: the arguments that name a model, loading that model, and `CommandError`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import memory

if TYPE_CHECKING:
    from ..llm import LLM


INTERRUPTED = 130  # the exit code that shells use for Ctrl-C


class CommandError(Exception):
    """An error to report to the user in one line, without a traceback."""


def add_to(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the arguments. `several`: the command takes several models, as the list `models`."""
    if several:
        parser.add_argument(
            "models", metavar="MODEL.pte", type=Path, nargs="+", help="language models made by executorch-mlx export"
        )
    else:
        parser.add_argument(
            "model", metavar="MODEL.pte", type=Path, help="language model made by executorch-mlx export"
        )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="Hugging Face folder with a tokenizer (default: the tokenizer in MODEL.pte)",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", type=Path, help="chat template in Jinja (default: that of the tokenizer)"
    )
    parser.add_argument(
        "--draft-model",
        metavar="DRAFT.pte",
        type=Path,
        help="smaller model with the same tokenizer, which guesses tokens; the answers stay the same",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        type=parse_size,
        help="limit of the memory for weights, KV caches and results together, such as 2GiB (default: no limit)",
    )


def parse_size(text: str) -> int:
    """Return the number of bytes in a size such as 2GiB, 512MiB, 1.5GB or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?)B?|B?)", text, re.IGNORECASE)
    if match:
        number, prefix, binary = match.groups()
        factor = (1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper())
        bytes = float(number) * factor
        if 1 <= bytes < 2**63 and (prefix or bytes.is_integer()):
            return int(bytes)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a size such as 2GiB, 512MiB or 1000000 (bytes)")


def load(options: argparse.Namespace, **settings: Any) -> LLM:
    """Load the model that the command line names and return it. Raises CommandError or OSError if that fails.

    `settings` are further arguments of `LLM.load`.
    """
    try:
        from ..llm import LLM

        if options.memory_limit is not None:
            memory.set_memory_limit(options.memory_limit)
        return LLM.load(
            options.model, options.tokenizer, draft=options.draft_model, chat_template=options.chat_template, **settings
        )
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed: pip install 'executorch-mlx[llm]'") from error
    except (ValueError, RuntimeError) as error:
        name = f"{options.model}: "
        raise CommandError(name + str(error).removeprefix(name)) from error
