"""What `run` and `serve` have in common: a language model by its file."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..llm import LLM


class CommandError(Exception):
    """What cannot be done, in one sentence for the user."""


@contextmanager
def quiet() -> Iterator[None]:
    """What the wheels have to say about each other while they are imported is not for this page."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.pte", type=Path)
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="a Hugging Face folder, not the tokenizer in the file")


def load(options: argparse.Namespace) -> LLM:
    """The model that the command line names; CommandError or OSError where there is none."""
    try:
        with quiet():
            from ..llm import LLM
        return LLM.load(options.model, options.tokenizer, profile=bool(getattr(options, "profile", None)))
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed: pip install 'executorch-mlx[llm]'") from error
    except (ValueError, RuntimeError) as error:
        raise CommandError(f"{options.model}: {error}") from error
