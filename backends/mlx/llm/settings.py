"""How the tokens of an answer are chosen: what a caller may ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


class SettingError(ValueError):
    """A setting that is out of its range, or that the program cannot honour; `name` is which."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}{message}")
        self.name = name


@dataclass(frozen=True)
class Settings:
    """The parameters of a draw, each off by default; None is off too.

    - `temperature`: 0 is greedy.
    - `top_p`, `top_k`, `min_p`: filters; 1, 0 and 0 are off.
    - `seed`: of the first token, that of the next is one more; None takes a random one.
    - `repetition_penalty` (1 is off), `presence_penalty` and `frequency_penalty` (0 is off): over
      the last tokens of prompt and answer.
    - `logit_bias`: token id → number added to its logit.
    - `allowed_tokens`: called before every draw with the ids of the answer so far; gives a bit
      for every token of the vocabulary, int32 `[ceil(V / 32)]` as `xgrammar` packs them, or
      None where all are allowed.

    Raises SettingError.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_tokens: Callable[[Sequence[int]], Any] | None = None

    def __post_init__(self):
        for entry in fields(self):
            if getattr(self, entry.name) is None and entry.name not in ("seed", "allowed_tokens"):
                off = {} if entry.name == "logit_bias" else entry.default
                object.__setattr__(self, entry.name, off)
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            _number(name, getattr(self, name))
        if self.repetition_penalty <= 0:
            raise SettingError("repetition_penalty", f" is {self.repetition_penalty}, expected above 0")
        _whole("top_k", self.top_k, -(2**63), 2**63)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64)
        if not isinstance(self.logit_bias, Mapping):
            raise SettingError("logit_bias", f" is {self.logit_bias!r}, expected token ids with numbers")
        for token, value in self.logit_bias.items():
            _whole("logit_bias", token, 0, 2**63)
            _number("logit_bias", value, infinite=True)
        if self.allowed_tokens is not None and not callable(self.allowed_tokens):
            raise SettingError("allowed_tokens", f" is {self.allowed_tokens!r}, expected a function")

    def asked(self) -> list[str]:
        """The names of those that are on."""
        on = {
            "top_k": self.top_k > 0,
            "min_p": self.min_p > 0,
            "seed": self.seed is not None,
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "logit_bias": bool(self.logit_bias),
            "allowed_tokens": self.allowed_tokens is not None,
        }
        return [name for name, value in on.items() if value]


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def seed_of(base: int, step: int) -> int:
    """The seed of draw `step`, as a signed number of 64 bits: the end goes round."""
    seed = (base + step) % 2**64
    return seed - 2**64 if seed >= 2**63 else seed


def _number(name: str, value: Any, infinite: bool = False) -> None:
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not right or math.isnan(value) or (math.isinf(value) and not infinite):
        raise SettingError(name, f" is {value!r}, expected a number")


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingError(name, f" is {value!r}, expected an integer")
    if not low <= value < high:
        raise SettingError(name, f" is {value}, expected {'an id' if low == 0 else '64 bits'}")
