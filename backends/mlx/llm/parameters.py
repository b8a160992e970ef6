"""The inputs of a token's method beside the tokens: see docs/llm-program.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """Which parameters a program takes; one that it does not take costs nothing.

    `temperature` and `top_p` are always there.
    """

    seed: bool = True
    top_k: bool = True
    min_p: bool = True
    penalties: int = 0  # how many of the last tokens they look at; 0 is none of the three
    logit_bias: int = 0  # for how many tokens at most
    allowed_tokens: bool = False

    def __post_init__(self):
        for name in ("penalties", "logit_bias"):
            if getattr(self, name) < 0:
                raise ValueError(f"Sampling: {name} is {getattr(self, name)}, expected at least 0")

    @classmethod
    def none(cls) -> Sampling:
        """That of a program without a head."""
        return cls(seed=False, top_k=False, min_p=False)

    def adjusts(self) -> str | None:
        """The first of the parameters that stand before the draw, if it takes one."""
        return next((n for n in ("penalties", "logit_bias", "allowed_tokens") if getattr(self, n)), None)

    def inputs(self, batch: int, vocab_size: int) -> dict[str, torch.Tensor]:
        """Example values, in the order of the method's inputs."""
        inputs = {"temperature": torch.tensor(0.8), "top_p": torch.tensor(0.95)}
        if self.seed:
            inputs["seed"] = torch.tensor(0)
        if self.top_k:
            inputs["top_k"] = torch.tensor(40)
        if self.min_p:
            inputs["min_p"] = torch.tensor(0.05)
        if self.penalties:
            inputs["repetition_penalty"] = torch.tensor(1.0)
            inputs["presence_penalty"] = torch.tensor(0.0)
            inputs["frequency_penalty"] = torch.tensor(0.0)
        if self.logit_bias:
            inputs["bias_tokens"] = torch.zeros(self.logit_bias, dtype=torch.int64)
            inputs["bias_values"] = torch.zeros(self.logit_bias)
        if self.allowed_tokens:
            inputs["allowed_tokens"] = torch.full((batch, -(-vocab_size // 32)), -1, dtype=torch.int32)
        return inputs

    def metadata(self) -> dict[str, bool | int]:
        """What the program says of it."""
        return {
            "sampling_seed": self.seed,
            "sampling_top_k": self.top_k,
            "sampling_min_p": self.min_p,
            "sampling_penalties": self.penalties > 0,
            "sampling_history": self.penalties,
            "sampling_logit_bias": self.logit_bias,
            "sampling_allowed_tokens": self.allowed_tokens,
        }
