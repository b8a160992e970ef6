"""The argument `--adapter` of the commands that run a language model.

`--adapter NAME=DIR` loads a LoRA adapter that requests can name, and `--adapter DIR` merges one into the weights of a
checkpoint.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.adapter_files import read_adapter
from ..llm.export_options import OPTIONS
from .errors import CommandError, reason

if TYPE_CHECKING:
    from ..llm import LLM

SLOTS = 4  # of a checkpoint that is exported because of an adapter; more if there are more adapters


@dataclass(frozen=True)
class AdapterFolder:
    """A folder with an adapter. `name` is its name in requests, or None if the adapter is to be merged."""

    path: Path
    name: str | None = None


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter",
        metavar="[NAME=]DIR",
        type=_parse,
        action="append",
        default=[],
        help="NAME=DIR: load the LoRA adapter in this folder of peft or mlx-lm, for which the program must have room; "
        "a checkpoint is exported with room. DIR: merge the adapter into the weights of a checkpoint, if MODEL is one",
    )


def _parse(argument: str) -> AdapterFolder:
    match = re.fullmatch(r"([^/=]+)=(.+)", argument, re.DOTALL)
    return AdapterFolder(Path(match[2]), match[1]) if match else AdapterFolder(Path(argument))


def named(options: argparse.Namespace) -> list[AdapterFolder]:
    """Return the adapters to load. Raises CommandError if two have the same name."""
    found = [folder for folder in getattr(options, "adapter", []) if folder.name is not None]
    names = [folder.name for folder in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise CommandError(f"--adapter: got the name {twice[0]} twice")
    return found


def merged(options: argparse.Namespace) -> dict[str, str]:
    """Return the option of the export for the adapter to merge. Raises CommandError if there are several."""
    folders = [folder for folder in getattr(options, "adapter", []) if folder.name is None]
    if len(folders) > 1:
        raise CommandError(f"--adapter: got {len(folders)} adapters to merge, expected one; NAME=DIR loads an adapter")
    return {"adapter": str(folders[0].path.resolve())} if folders else {}


def room(folders: Sequence[AdapterFolder], values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an export that has room for the adapters in `folders`. `values` are those of the user."""
    if not folders:
        return {}
    ranks = [len(layer.a) for folder in folders for layer in read(folder).values()]
    sizes = {"adapters": max(SLOTS, len(folders)), "lora_rank": max(OPTIONS["lora_rank"].default, *ranks)}
    return {name: size for name, size in sizes.items() if name not in values}


def read(folder: AdapterFolder) -> dict[str, Any]:
    try:
        return read_adapter(folder.path)
    except (OSError, ValueError) as error:
        raise CommandError(f"--adapter {folder.name}: {reason(error)}") from error


def load(llm: LLM, folders: Sequence[AdapterFolder]) -> None:
    """Load adapters. Raises CommandError."""
    for folder in folders:
        try:
            llm.load_adapter(folder.name, folder.path)
        except (OSError, ValueError, RuntimeError) as error:
            raise CommandError(f"--adapter {folder.name}: {reason(error)}") from error
