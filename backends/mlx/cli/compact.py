"""`executorch-mlx compact`"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..inspect.pte import ProgramError
from ..quiet import quiet_imports
from .errors import CommandError


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compact",
        help="remove unused weights from a weights file",
        description="Remove the weights from a file of export --weights-file that no program in its folder needs any "
        "more, for example because it was exported again in another format.",
    )
    parser.add_argument("file", metavar="FILE.ptd", type=Path, help="weights file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    before = options.file.stat().st_size
    with quiet_imports():
        from ..weights_file import compact

        try:
            programs = compact(options.file)
        except (ValueError, ProgramError) as error:
            raise CommandError(str(error)) from error
    after = options.file.stat().st_size
    names = ", ".join(program.name for program in programs)
    print(f"{options.file}: {before / 1e6:,.1f} MB to {after / 1e6:,.1f} MB; needed by {names}")
    return 0
