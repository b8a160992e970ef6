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

    @classmethod
    def none(cls) -> Sampling:
        """That of a program without a head."""
        return cls(seed=False, top_k=False, min_p=False)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Example values, in the order of the method's inputs."""
        examples = {
            "temperature": torch.tensor(0.8),
            "top_p": torch.tensor(0.95),
            "seed": torch.tensor(0) if self.seed else None,
            "top_k": torch.tensor(40) if self.top_k else None,
            "min_p": torch.tensor(0.05) if self.min_p else None,
        }
        return {name: value for name, value in examples.items() if value is not None}

    def metadata(self) -> dict[str, bool | int]:
        """What the program says of it."""
        return {
            "sampling_seed": self.seed,
            "sampling_top_k": self.top_k,
            "sampling_min_p": self.min_p,
        }
