"""Runs the code of the sampling head on the host, for programs that return logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sampling_head import sample_logits
from ..sampling_parameters import PENALTIES, SCALARS, SamplingParameters


def sample(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    seed: int,
    history: Sequence[Sequence[int]] = (),
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw tokens `[B]` int64 from logits `[B, V]`.

    The sampling head of a program draws the same tokens, except where the device of the program rounds
    differently. `seed` determines the draw; `parameters.seed` is not used. `history` holds, for each
    sequence, the token ids that the penalties count. `allowed` is the mask of allowed tokens, int32
    `[B, ceil(V / 32)]`, or None.
    """
    enabled = [name for name in parameters.enabled() if name in SCALARS]
    arguments = {name: getattr(parameters, name) for name in enabled}
    arguments |= {"temperature": parameters.temperature, "seed": seed}
    if any(name in PENALTIES for name in enabled):
        arguments["history"] = _padded(history)
    if parameters.logit_bias:
        arguments["bias_tokens"] = torch.tensor(list(parameters.logit_bias))
        arguments["bias_values"] = torch.tensor(list(parameters.logit_bias.values()), dtype=torch.float32)
    return sample_logits(logits, **arguments, allowed_tokens=allowed)


def _padded(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the sequences as a tensor `[B, N]` int64, padded with -1, which the penalties ignore."""
    longest = max(map(len, sequences))
    return torch.tensor([[*ids, *[-1] * (longest - len(ids))] for ids in sequences], dtype=torch.int64)
