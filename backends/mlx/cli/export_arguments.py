"""The options of an export as arguments of commands, from the table in `llm/export_options.py`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..llm.export_options import OPTIONS

# Those that commands take which export a checkpoint and run the program.
RUN_OPTIONS = (
    "dtype",
    "quantize",
    "group_size",
    "calibrate",
    "activations",
    "adapter",
    "adapters",
    "lora_rank",
    "adapter_targets",
    "max_context_len",
    "sliding_window",
    "chunk",
    "batch",
    "kv_bits",
    "allow_extensions",
    "verify",
)
_FILES = ("adapter", "calibrate")  # whose values are paths


def add_options(parser: argparse.ArgumentParser, names: tuple[str, ...] = tuple(OPTIONS), title: str = "") -> None:
    """Add options of the table. Those that are not given are missing in the result of the parser.

    `title` is that of the group for all of them. By default, each has the group of the table.
    """
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for name in names:
        spec = OPTIONS[name]
        group_name = title or spec.group
        if group_name not in groups:
            groups[group_name] = parser.add_argument_group(group_name)
        group = groups[group_name]
        if len(spec.flags) > 1:
            group = group.add_mutually_exclusive_group()
        for text, value in spec.flags.items():
            default = " (default)" if value == spec.default else ""
            group.add_argument(
                text, dest=name, action="store_const", const=value, default=argparse.SUPPRESS, help=spec.help + default
            )
        if not spec.flags:
            default = spec.default_text or spec.default
            group.add_argument(
                flag(name),
                type=spec.type,
                choices=spec.choices or None,
                metavar=spec.metavar,
                default=argparse.SUPPRESS,
                help=spec.help + (f" (default: {default})" if default else ""),
            )


def flag(name: str) -> str:
    """Return the flag of an option."""
    spec = OPTIONS[name]
    return next((text for text, value in spec.flags.items() if value != spec.default), f"--{name.replace('_', '-')}")


def given(options: argparse.Namespace, names: tuple[str, ...] = tuple(OPTIONS)) -> dict[str, Any]:
    """Return the options of the table that the command line has. Paths are absolute."""
    values = {name: getattr(options, name) for name in names if name in options}
    return values | {n: str(Path(values[n]).resolve()) for n in _FILES if isinstance(values.get(n), Path)}


def flags(values: Mapping[str, Any]) -> str:
    """Return options as they are given on a command line."""
    return shlex.join(_words(values))


def command(model: Path, program: Path, values: Mapping[str, Any], kind: str | None) -> list[str]:
    """Return the command that exports `model` to `program` with the options `values`.

    With a `kind`, it refuses a model of another kind before it reads its weights.
    """
    words = _words(values) if kind is None else ["--expect", kind, *_words(values)]
    return [sys.executable, "-m", "executorch_mlx", "export", str(model), "-o", str(program), *words]


def _words(values: Mapping[str, Any]) -> list[str]:
    return [
        word
        for name, value in values.items()
        for word in ([flag(name)] if OPTIONS[name].flags else [flag(name), _text(value)])
    ]


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, (list, tuple)) else str(value)
