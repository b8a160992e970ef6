"""The extras of this package that commands need."""

from __future__ import annotations

from importlib.util import find_spec

from .errors import CommandError

EXPORT = ("torch", "transformers", "safetensors", "rich")


def check_installed(command: str, extra: str, modules: tuple[str, ...]) -> None:
    """Raise CommandError, with the command that installs `extra`, if one of its `modules` is missing."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise CommandError(f"{command} needs {' and '.join(missing)}: pip install 'executorch-mlx[{extra}]'")
