"""`executorch-mlx list`"""

from __future__ import annotations

import argparse
from datetime import datetime

from . import export_arguments, store


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "list",
        help="list the models that were exported for later runs",
        description=f"List the models that run, chat, serve and pull have exported to {store.folder('programs')}: the "
        "size of the program, the day of the export, the model, and the options of the export.",
    )
    parser.add_argument("--paths", action="store_true", help="print the paths of the programs instead of the sizes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for export in store.exports():
        status = export.path.stat()
        day = datetime.fromtimestamp(status.st_mtime).date()
        words = [export_arguments.flags(export.options)] if export.options else []
        size = str(export.path) if options.paths else f"{status.st_size / 1e6:10,.1f} MB"
        print("  ".join([size, str(day), export.model, *words]))
    return 0
