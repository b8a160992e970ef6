"""`SamplingHead`: a model of logits becomes a model of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..custom_kernel_ops.sample import sample


class SamplingHead(torch.nn.Module):
    """Calls `model` and draws the next token of every row from its logits.

    `model(*args, **kwargs)` returns logits `[B, S, V]`, of which the last position counts, or
    `[B, V]`; float32, float16 or bfloat16. It may return them first of a tuple, or as
    `.logits` or `["logits"]` of a Hugging Face output.

    The parameters are those of `mlx::sample`. Each is a number, or a tensor of one element.
    Under `torch.export` a tensor becomes an input of the program, a number a part of it, and a
    filter that is None emits nothing.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self, *args, temperature, top_k=None, top_p=1.0, seed=None, min_p=None, **kwargs
    ) -> torch.Tensor:
        """Tokens `[B]` int64.

        `temperature` <= 0 is greedy; `top_p` >= 1, `top_k` <= 0 or >= V, and `min_p` <= 0 are
        off. `seed`: the same seed, the same tokens; None draws anew in every call. The caller
        moves it on from step to step. Raises TypeError or ValueError naming the argument.
        """
        logits = _last_logits(self.model(*args, **kwargs))
        return sample(
            logits,
            _scalar("temperature", temperature, torch.float32),
            _scalar("top_p", top_p, torch.float32),
            _scalar("seed", seed, torch.int64, optional=True),
            _scalar("top_k", top_k, torch.int64, optional=True),
            _scalar("min_p", min_p, torch.float32, optional=True),
        )


def _last_logits(output) -> torch.Tensor:
    """`[B, V]` of what a model returned."""
    logits = output
    if isinstance(output, Mapping) and "logits" in output:
        logits = output["logits"]
    elif hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, torch.Tensor):
        raise TypeError(
            f"SamplingHead: the model returned {type(output).__name__}, expected a tensor of "
            "logits, a tuple that begins with one, or an output with .logits"
        )
    if logits.dim() not in (2, 3):
        raise ValueError(
            f"SamplingHead: logits have shape {list(logits.shape)}, expected [B, S, V] or [B, V]"
        )
    return logits[:, -1] if logits.dim() == 3 else logits


def _scalar(name: str, value, dtype: torch.dtype, optional: bool = False):
    """A 0-d tensor of `dtype`, or None. An integer may stand for a float, not the reverse."""
    if value is None and optional:
        return None
    whole = not dtype.is_floating_point
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"SamplingHead: {name} has shape {list(value.shape)}, expected one element"
            )
        right = not value.is_complex() and value.dtype != torch.bool
        if right and not (whole and value.is_floating_point()):
            return (value.reshape(()) if value.dim() else value).to(dtype)
        received = value.dtype
    else:
        kinds = (int, torch.SymInt) if whole else (int, float, torch.SymInt, torch.SymFloat)
        if isinstance(value, kinds) and not isinstance(value, bool):
            if whole and isinstance(value, int) and not -(2**63) <= value < 2**63:
                if name != "seed" or not 0 <= value < 2**64:
                    raise ValueError(f"SamplingHead: {name} is {value}, expected 64 bits")
                value -= 2**64  # the same bits as a signed number
            return torch.full((), value, dtype=dtype)
        received = type(value).__name__
    expected = "an integer" if whole else "a number"
    raise TypeError(f"SamplingHead: {name} is {received}, expected {expected} or a tensor of one")
