"""The arguments for sampling, from the table in `llm/sampling_parameters.py`."""

from __future__ import annotations

import argparse
from typing import Any

from ..llm.sampling_parameters import SCALARS, SamplingParameters, SettingError
from .errors import CommandError

_LENGTHS = {
    "max_new_tokens": "largest number of tokens in an answer (default: as many as the context holds)",
    "min_new_tokens": "smallest number of tokens in an answer (default: 0)",
}


def add_to(parser: argparse.ArgumentParser) -> None:
    for name, help in _LENGTHS.items():
        parser.add_argument(_flag(name), type=int, metavar="N", help=help)
    for name, spec in SCALARS.items():
        default = "random" if spec.off is None else f"that of the model, or {spec.off:g}"
        parser.add_argument(
            _flag(name),
            type=spec.type,
            metavar="N" if spec.type is int else "X",
            help=f"{spec.help} (default: {default})",
        )


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line has. Raises CommandError for a value out of range."""
    values = {name: getattr(options, name, None) for name in (*_LENGTHS, *SCALARS)}
    values = {name: value for name, value in values.items() if value is not None}
    check(values)
    return values


def check(values: dict[str, Any]) -> None:
    """Raise CommandError for a value out of range."""
    parameters = {name: value for name, value in values.items() if name in SCALARS}
    try:
        SamplingParameters(**parameters)
    except SettingError as error:
        raise CommandError(str(error)) from error
    for name in _LENGTHS:
        if values.get(name, 0) < 0:
            raise CommandError(f"{_flag(name)}: got {values[name]}, expected at least 0")
    for name, value in parameters.items():
        spec = SCALARS[name]
        low, high = spec.low, spec.high
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            expected = f"at least {low}" if high is None else f"{low} to {high}"
            raise CommandError(f"{_flag(name)}: got {value:g}, expected {expected}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
