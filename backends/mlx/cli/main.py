"""Reads the command line; what it asks for is done by the module of that name."""

from __future__ import annotations

import argparse
import os
import sys

from . import doctor, export, inspect, run, serve
from .model import CommandError
from .pte import ProgramError

# Modules with `add_to`. They import what is heavy, torch first of all, when they run.
COMMANDS = (export, run, serve, inspect, doctor)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, 1 if something is wrong, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="executorch-mlx", description="Tools of the MLX delegate for ExecuTorch.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:
        raise
    except (CommandError, ProgramError, OSError) as error:
        print(f"executorch-mlx: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return run.INTERRUPTED


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
