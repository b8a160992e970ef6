"""The `executorch-mlx` command line: parses the arguments and runs the module of the command."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import NoReturn

from .errors import INTERRUPTED, CommandError, ReportedError, reason

# One module for each command. Its function `add_to` adds the command to the parser.
COMMANDS = (
    "run",
    "chat",
    "serve",
    "batch",
    "embed",
    "transcribe",
    "pull",
    "list",
    "rm",
    "export",
    "finetune",
    "compact",
    "inspect",
    "doctor",
)


class _Parser(argparse.ArgumentParser):
    """Answers wrong usage in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"executorch-mlx: {message}; see {self.prog} --help\n")


class _PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata  # takes longer than the rest of a command line

        try:
            version = importlib.metadata.version("executorch-mlx")
        except importlib.metadata.PackageNotFoundError:
            version = "is not installed, runs from its sources"
        print(f"executorch-mlx {version}")
        parser.exit()


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    parser = _Parser(
        prog="executorch-mlx", description="Export, run, serve and inspect models for the MLX delegate of ExecuTorch."
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    arguments = sys.argv[1:] if arguments is None else arguments
    # Only the module of the given command is imported. The other modules import large packages, which takes time.
    for name in COMMANDS if not arguments or arguments[0] not in COMMANDS else arguments[:1]:
        import_module(f".{name}", __package__).add_to(commands)
    options, others = parser.parse_known_args(arguments)
    if others:
        hint = f": {options.hint}" if "hint" in options else ""
        commands.choices[options.command].error(f"got {' '.join(others)}, which {options.command} does not take{hint}")
    try:
        return options.run(options)
    except BrokenPipeError:  # an OSError that `console` handles
        raise
    except ReportedError as error:
        return error.code
    except (CommandError, OSError) as error:
        print(f"executorch-mlx: {reason(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def console() -> int:
    """The console script: runs `main`. Prints no error if the process that reads the output, such as `head`, ends.

    torch reads the setting when it is loaded. Otherwise, its threads spin while they wait for each other. On processors
    that are busy with other work, an export then takes several times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        code = main()
        if sys.stdout is not None:  # None: standard output is closed
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(console())
