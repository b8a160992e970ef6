"""`executorch-mlx rm`"""

from __future__ import annotations

import argparse

from . import store
from .errors import CommandError


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "rm",
        help="remove exported models",
        description="Remove programs that run, chat, serve and pull have exported, with any options. The checkpoints "
        "stay where they are.",
    )
    parser.add_argument("models", metavar="MODEL", nargs="*", help="a name in executorch-mlx list, or its last part")
    parser.add_argument("--all", action="store_true", help="remove all")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.all == bool(options.models):
        raise CommandError("rm: expected models, or --all")
    exports = store.exports()
    removed = exports if options.all else [export for model in options.models for export in _named(model, exports)]
    print(f"{len(removed)} removed, {store.remove(removed) / 1e6:,.1f} MB")
    return 0


def _named(model: str, exports: list[store.Export]) -> list[store.Export]:
    """Return the exports of `model`. Raises CommandError if there are none, or if several models have the name."""
    found = [export for export in exports if export.model == store.full_name(model)]
    found = found or [export for export in exports if export.model.rpartition("/")[2] == model]
    if not found:
        raise CommandError(f"{model}: not in executorch-mlx list")
    if len(names := sorted({export.model for export in found})) > 1:
        raise CommandError(f"{model}: got the name of several models, expected one of {', '.join(names)}")
    return found
