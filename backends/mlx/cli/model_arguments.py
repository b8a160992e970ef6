"""Common parts of the commands: the arguments that name a model, loading that model, `CommandError` and `quiet`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..llm import LLM


class CommandError(Exception):
    """An error to report to the user in one line, without a traceback."""


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.pte", type=Path, help="language model made by executorch-mlx export")
    parser.add_argument(
        "--tokenizer", metavar="DIR", type=Path,
        help="Hugging Face folder with a tokenizer (default: the tokenizer in MODEL.pte)",
    )  # fmt: skip


def load(options: argparse.Namespace) -> LLM:
    """Load the model that the command line names and return it. Raises CommandError or OSError if that fails."""
    try:
        from ..llm import LLM

        return LLM.load(options.model, options.tokenizer, profile=bool(getattr(options, "profile", None)))
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed: pip install 'executorch-mlx[llm]'") from error
    except (ValueError, RuntimeError) as error:
        raise CommandError(f"{options.model}: {error}") from error
