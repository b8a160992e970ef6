"""`executorch-mlx pull`"""

from __future__ import annotations

import argparse

from . import export_arguments, model_arguments
from .files import CHECKPOINTS, check_checkpoint


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "pull",
        help="download and export a model for later runs",
        description="Download a model of the Hugging Face Hub, or what has changed there, and export it. Prints the "
        "path of the program. run, chat and serve do this for a model that they do not know yet.",
    )
    parser.add_argument("model", metavar="MODEL", help=CHECKPOINTS)
    model_arguments.add_export_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_checkpoint(options.model, CHECKPOINTS)
    values = export_arguments.given(options, export_arguments.RUN_OPTIONS)
    print(model_arguments.export_model(options.model, values).path)
    return 0
