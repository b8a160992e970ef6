"""The table of sampling parameters.

An instance of `SamplingParameters` holds the values for one request. The class itself is the table: the
metadata of each of its fields is a `ParameterSpec`. The sampling head, the export, the inputs of a
program, the command line and the server read the table, and a test compares the table with the C++
runner.

This module does not import torch, so that `--help` stays fast.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from .errors import SettingError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ParameterSpec:
    """The entry of the table for one parameter.

    - `off`: the off value, which is the default. The off value of the temperature, 0, means greedy
      decoding, and that of the seed, None, means a random seed. Any other parameter with its off value
      has no effect.
    - `off_when`: the comparison operator that tells whether a parameter is disabled. A parameter is
      disabled if `value <off_when> off` is true.
    - `dtype`: the dtype of the program input, a 0-d tensor; None if the parameter is not a scalar.
    - `metadata`: the metadata method that tells whether a program takes the parameter; None if
      every head takes the parameter.
    - `inputs`: the names of the parameter's program inputs, in order. A scalar has one input, with
      the name of the field.
    - `low`, `high`: the range that the server accepts, bounds included.
    """

    off: Any
    help: str
    off_when: str = "=="
    dtype: str | None = "float32"
    metadata: str | None = None
    inputs: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None

    @property
    def type(self) -> type:
        """The Python type of a scalar."""
        return int if self.dtype == "int64" else float

    def is_on(self, value: Any) -> bool:
        """Whether the parameter has an effect if its value is `value`."""
        compare = {"==": operator.eq, "<=": operator.le, ">=": operator.ge}[self.off_when]
        return not compare(value, self.off)

    def tensor(self, value: float | None = None) -> torch.Tensor:
        """Return the program input for `value`, a 0-d tensor; by default the off value. A seed of None becomes 0."""
        import torch

        value = self.off if value is None else value
        return torch.tensor(0 if value is None else value, dtype=getattr(torch, self.dtype))


def _parameter_field(off: Any, help: str, **spec: Any) -> Any:
    default = {"default_factory": dict} if off == {} else {"default": off}
    return field(**default, metadata={"spec": ParameterSpec(off, help, **spec)})


@dataclass(frozen=True)
class SamplingParameters:
    """The sampling parameters of one request, in the order of the inputs of a program.

    By default, each parameter has its off value. None also stands for the off value. The numbers of numpy are accepted,
    and become Python numbers.

    - `temperature`, `top_p`, `top_k`, `min_p`: see `mlx::sample`.
    - `seed`: the seed of the first draw. Step `i` draws with `seed + i`.
    - `repetition_penalty`, `presence_penalty`, `frequency_penalty`: see `adjust_logits`. They apply to
      the last tokens of prompt and answer.
    - `logit_bias`: maps a token id to the number that is added to the logit of the token.
    - `allowed_tokens`: called before each draw with the token ids of the answer so far. Returns the
      mask of the tokens that may come next, int32 `[ceil(V / 32)]` as `adjust_logits` takes it, or
      None to allow all.

    Raises SettingError for a value of the wrong type or out of range.
    """

    temperature: float = _parameter_field(0.0, "divide the logits by this; 0 is greedy decoding", off_when="<=", low=0)
    top_p: float = _parameter_field(
        1.0, "keep the most likely tokens up to this total probability; 1 keeps all", off_when=">=", low=0, high=1
    )
    seed: int | None = _parameter_field(
        None, "the same seed gives the same tokens", dtype="int64", metadata="sampling_seed"
    )
    top_k: int = _parameter_field(
        0, "keep the N most likely tokens; 0 keeps all", off_when="<=", dtype="int64", metadata="sampling_top_k"
    )
    min_p: float = _parameter_field(
        0.0,
        "keep tokens with at least this fraction of the highest probability; 0 keeps all",
        off_when="<=",
        metadata="sampling_min_p",
        low=0,
        high=1,
    )
    repetition_penalty: float = _parameter_field(
        1.0, "values above 1 make tokens that occurred less likely; 1 changes nothing", metadata="sampling_penalties"
    )
    presence_penalty: float = _parameter_field(
        0.0, "subtract this from the logits of tokens that occurred; 0 changes nothing", metadata="sampling_penalties"
    )
    frequency_penalty: float = _parameter_field(
        0.0, "subtract this for each time that a token occurred; 0 changes nothing", metadata="sampling_penalties"
    )
    logit_bias: Mapping[int, float] = _parameter_field(
        {},
        "add numbers to the logits of some tokens",
        dtype=None,
        metadata="sampling_logit_bias",
        inputs=("bias_tokens", "bias_values"),
    )
    allowed_tokens: Callable[[Sequence[int]], Any] | None = _parameter_field(
        None, "draw only these tokens", dtype=None, metadata="sampling_allowed_tokens", inputs=("allowed_tokens",)
    )

    def __post_init__(self):
        for name, spec in PARAMETERS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, spec.off if value is None else python_number(value))
        for name, spec in SCALARS.items():
            value = getattr(self, name)
            if spec.type is float:
                _check_number(name, value)
            elif value is not None:
                check_integer(name, value, -(2**63), 2**64 if name == "seed" else 2**63, "64 bits")
        if self.repetition_penalty <= 0:
            raise SettingError("repetition_penalty", self.repetition_penalty, "more than 0")
        if not isinstance(self.logit_bias, Mapping):
            raise SettingError("logit_bias", repr(self.logit_bias), "a mapping from token ids to numbers")
        bias = {python_number(token): python_number(value) for token, value in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        for token, value in bias.items():
            check_integer("logit_bias", token, 0, 2**63, "a token id")
            _check_number("logit_bias", value, infinite=True)
        if self.allowed_tokens is not None and not callable(self.allowed_tokens):
            raise SettingError("allowed_tokens", repr(self.allowed_tokens), "a function")

    def enabled(self) -> list[str]:
        """Return the names of the parameters that have an effect."""
        return [name for name, spec in PARAMETERS.items() if spec.is_on(getattr(self, name))]


def _table() -> dict[str, ParameterSpec]:
    specs = {entry.name: entry.metadata["spec"] for entry in fields(SamplingParameters)}
    return {name: replace(spec, inputs=spec.inputs or (name,)) for name, spec in specs.items()}


PARAMETERS = _table()
SCALARS = {name: spec for name, spec in PARAMETERS.items() if spec.dtype is not None}
PENALTIES = tuple(name for name, spec in PARAMETERS.items() if spec.metadata == "sampling_penalties")
INPUTS = tuple(name for spec in PARAMETERS.values() for name in spec.inputs)
# Those of the logits processors, which change the logits before the filters.
PROCESSOR_INPUTS = (*PENALTIES, *PARAMETERS["logit_bias"].inputs, *PARAMETERS["allowed_tokens"].inputs)
TOKENS_PER_MASK_WORD = 32  # the number of tokens for which one integer of a mask of allowed tokens has a bit


def mask_word_count(vocab_size: int) -> int:
    """Return the number of 32-bit integers in the mask of a sequence: ceil(vocab_size / 32)."""
    return -(-vocab_size // TOKENS_PER_MASK_WORD)


def python_number(value: Any) -> Any:
    """Return a number of another library, such as numpy, as an int or a float. Return any other value unchanged."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _check_number(name: str, value: Any, infinite: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_finite = is_number and abs(value) <= sys.float_info.max  # false for integers that no float can hold
    if not is_finite and not (infinite and is_number and value in (math.inf, -math.inf)):
        raise SettingError(name, shown(value), "a number")


def check_integer(name: str, value: Any, low: int, high: int, expected: str) -> None:
    """Raise SettingError unless `value` is an integer of the range [low, high), which `expected` describes."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingError(name, repr(value), "an integer")
    if not low <= value < high:
        raise SettingError(name, shown(value), expected)


def shown(value: Any) -> str:
    """Return `value` for a message. An integer of more than 128 bits, whose digits may be too many, is described."""
    is_huge = isinstance(value, int) and value.bit_length() > 128
    return f"an integer of {value.bit_length()} bits" if is_huge else repr(value)
