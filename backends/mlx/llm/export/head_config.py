"""`HeadConfig`: which sampling parameters an exported program takes as inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..sampling_parameters import SCALARS, mask_word_count


@dataclass(frozen=True)
class HeadConfig:
    """The optional inputs of a program's sampling head. An input that is left out costs nothing.

    `temperature` and `top_p` are always inputs. `penalties` is the number of last tokens in which the
    penalties count occurrences. `logit_bias` is the largest number of tokens with a bias. `logprobs` is the number
    of most likely tokens whose log probabilities the program can return. If one of these three
    numbers is 0, the program lacks the inputs for it.

    Raises ValueError for a negative number.
    """

    seed: bool = True
    top_k: bool = True
    min_p: bool = True
    penalties: int = 0
    logit_bias: int = 0
    allowed_tokens: bool = False
    logprobs: int = 0

    def __post_init__(self):
        for name in ("penalties", "logit_bias", "logprobs"):
            if getattr(self, name) < 0:
                raise ValueError(f"HeadConfig: {name}: got {getattr(self, name)}, expected at least 0")

    @classmethod
    def minimal(cls) -> HeadConfig:
        """Return the config of a head with `temperature` and `top_p` only."""
        return cls(seed=False, top_k=False, min_p=False)

    def logits_processors(self) -> list[str]:
        """The names of the enabled logits processors: the fields above that change the logits before the filters."""
        return [name for name in ("penalties", "logit_bias", "allowed_tokens") if getattr(self, name)]

    def inputs(self, batch: int, vocab_size: int, *, per_row: bool = False) -> dict[str, torch.Tensor]:
        """Return example inputs of the head by name, in the order in which the method takes them.

        All have their off values. `batch` is the number of draws in a call. With `per_row`, each draw has values of its
        own: every input has a first dimension of size `batch`. Otherwise, only `allowed_tokens` has this dimension.
        """
        metadata = self.metadata()
        inputs = {n: s.tensor() for n, s in SCALARS.items() if s.metadata is None or metadata[s.metadata]}
        if self.logit_bias:
            inputs["bias_tokens"] = torch.zeros(self.logit_bias, dtype=torch.int64)
            inputs["bias_values"] = torch.zeros(self.logit_bias)
        if self.logprobs:
            inputs["logprobs"] = torch.tensor(0)
        if per_row:
            inputs = {name: value.expand(batch, *value.shape).clone() for name, value in inputs.items()}
        if self.allowed_tokens:
            inputs["allowed_tokens"] = torch.full((batch, mask_word_count(vocab_size)), -1, dtype=torch.int32)
        # `logprobs` is the last input.
        return {name: inputs[name] for name in sorted(inputs, key=lambda name: name == "logprobs")}

    def metadata(self) -> dict[str, bool | int]:
        """Return the metadata methods that describe the head, name → value."""
        return {
            "sampling_seed": self.seed,
            "sampling_top_k": self.top_k,
            "sampling_min_p": self.min_p,
            "sampling_penalties": self.penalties > 0,
            "sampling_history": self.penalties,
            "sampling_logit_bias": self.logit_bias,
            "sampling_allowed_tokens": self.allowed_tokens,
            "sampling_logprobs": self.logprobs,
        }
