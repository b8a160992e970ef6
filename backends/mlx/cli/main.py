"""Reads the command line; what it asks for is done by the module of that name."""

from __future__ import annotations

import argparse
import os
import sys

from . import doctor, inspect
from .pte import ProgramError


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, 1 if something is wrong, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="executorch-mlx", description="Tools of the MLX delegate for ExecuTorch.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (inspect, doctor):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ProgramError, OSError) as error:
        print(f"executorch-mlx: {error}", file=sys.stderr)
        return 1


def console() -> int:
    """The console script: as `main`, and quiet where a reader such as `head` has had enough."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(console())
