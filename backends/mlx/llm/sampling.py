"""`SamplingHead`: a model of logits becomes a model of tokens.

    logits → penalties → bias → allowed tokens → temperature, filters and draw

`adjust_logits` is what stands before the draw, `sample_logits` all of it, `SamplingHead` all of
it on top of a model. What is None is left out, of a program too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..custom_kernel_ops.penalties import bias_logits, mask_logits, penalize_logits
from ..custom_kernel_ops.sample import sample


class SamplingHead(torch.nn.Module):
    """Calls `model` and draws the next token of every row from its logits.

    `model(*args, **kwargs)` returns logits `[B, S, V]`, of which the last position counts, or
    `[B, V]`; float32, float16 or bfloat16. It may return them first of a tuple, or as
    `.logits` or `["logits"]` of a Hugging Face output.

    The parameters are those of `sample_logits`, and under `torch.export` a tensor becomes an
    input of the program, a number a part of it.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self, *args, temperature, top_k=None, top_p=1.0, seed=None, min_p=None,
        repetition_penalty=None, presence_penalty=None, frequency_penalty=None, history=None,
        history_valid=None, bias_tokens=None, bias_values=None, allowed_tokens=None, **kwargs,
    ) -> torch.Tensor:  # fmt: skip
        """Tokens `[B]` int64."""
        return sample_logits(
            _last_logits(self.model(*args, **kwargs)),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            history=history,
            history_valid=history_valid,
            bias_tokens=bias_tokens,
            bias_values=bias_values,
            allowed_tokens=allowed_tokens,
        )


def sample_logits(
    logits, *, temperature, top_k=None, top_p=1.0, seed=None, min_p=None, **adjustments
) -> torch.Tensor:
    """Tokens `[B]` int64 of logits `[B, V]`, drawn by `mlx::sample` after `adjust_logits`.

    Each parameter is a number, or a tensor of one element. `temperature` <= 0 is greedy;
    `top_p` >= 1, `top_k` <= 0 or >= V, and `min_p` <= 0 are off. `seed`: the same seed, the same
    tokens; None draws anew in every call. The caller moves it on from step to step. Raises
    TypeError or ValueError naming the argument.
    """
    return sample(
        adjust_logits(logits, **adjustments),
        _scalar("temperature", temperature, torch.float32),
        _scalar("top_p", top_p, torch.float32),
        _scalar("seed", seed, torch.int64, optional=True),
        _scalar("top_k", top_k, torch.int64, optional=True),
        _scalar("min_p", min_p, torch.float32, optional=True),
    )


def adjust_logits(
    logits, *, repetition_penalty=None, presence_penalty=None, frequency_penalty=None,
    history=None, history_valid=None, bias_tokens=None, bias_values=None, allowed_tokens=None,
) -> torch.Tensor:  # fmt: skip
    """Logits `[B, V]` as they are drawn from: float32, or as they came if nothing is given.

    - `repetition_penalty`, `presence_penalty`, `frequency_penalty`: numbers, or tensors of one
      element, over the tokens of `history` `[B, N]` int64 where `history_valid` `[B, N]` bool
      says that they count, or all. The first, off at 1, divides a positive logit of a token in
      there and multiplies any other; the second and the third, off at 0, are subtracted once
      and for each time that it occurs.
    - `bias_tokens` `[K]` int64 and `bias_values` `[K]`: what is added to the logits of tokens.
      Tokens may repeat, and add up; what is outside the vocabulary is left alone.
    - `allowed_tokens` `[B, ceil(V / 32)]` int32: no other token is drawn. Bit v % 32 of word
      v // 32 is that of token v, as `xgrammar` packs them. Where no allowed token has a finite
      logit, and so where none is allowed, token 0 is drawn.

    Raises TypeError or ValueError naming the argument.
    """
    penalties = {
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    given = [name for name, value in penalties.items() if value is not None]
    _together(f"{given[0]} and history" if given else "a penalty and history", given, history)
    _together("bias_tokens and bias_values", bias_tokens, bias_values)
    if given:
        values = [_scalar(n, v, torch.float32, optional=True) for n, v in penalties.items()]
        logits = penalize_logits(logits, history, history_valid, *values)
    elif history_valid is not None:
        raise TypeError("SamplingHead: history_valid came without history")
    if bias_tokens is not None:
        logits = bias_logits(logits, bias_tokens, bias_values)
    if allowed_tokens is not None:
        logits = mask_logits(logits, allowed_tokens)
    return logits


def _together(names: str, one, other) -> None:
    if (one is None or one == []) != (other is None):
        raise TypeError(f"SamplingHead: {names} come together, and one of them is missing")


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
