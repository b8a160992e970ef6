"""`SamplingHead`: turns a model that returns logits into a model that returns tokens.

    logits → penalties → bias → allowed tokens → temperature, filters and draw

`adjust_logits` does the steps before the temperature. `sample_logits` does all steps. A parameter that
is None adds nothing to an exported program.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping

import torch

from ..custom_kernel_ops.checks import is_per_row
from ..custom_kernel_ops.logits_processors import bias_logits, mask_logits, penalize_logits
from ..custom_kernel_ops.sample import sample
from .sampling_parameters import INPUTS, SCALARS, python_number, shown

HEAD_ARGUMENTS = (*INPUTS, "history", "history_valid")


class SamplingHead(torch.nn.Module):
    """Calls `model` and draws the next token of every sequence from the logits that `model` returns.

    `model(*args, **kwargs)` returns logits `[B, V]` or `[B, S, V]`, in float32, float16 or bfloat16.
    Of logits `[B, S, V]`, the head uses the last position. The output of `model` may also be a tuple
    whose first element is the logits, or a Hugging Face output with `.logits` or `["logits"]`.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.forward = types.MethodType(_forward_of(model), self)

    def forward(self, *args, temperature, **kwargs) -> torch.Tensor:
        """Return tokens `[B]` int64.

        The keyword arguments of `sample_logits` and `adjust_logits` go to the head. All other
        arguments go to the model. Under `torch.export`, an argument of the head that is a tensor
        becomes an input of the program, and one that is a number becomes a constant.

        The signature of the method of an instance has the names of all arguments: those of `model.forward`, and then
        those of the head. They are the names, and the order, in the argument `dynamic_shapes` of `torch.export.export`.
        """
        parameters = {name: kwargs.pop(name) for name in HEAD_ARGUMENTS if name in kwargs}
        logits = _last_logits(self.model(*args, **kwargs))
        return sample_logits(logits, temperature=temperature, **parameters)


def _forward_of(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """Return `SamplingHead.forward` with a signature that has the arguments of `model`.

    An argument of `model` that has the name of an argument of the head can only be given by position.
    """

    def forward(self, *args, **kwargs):
        return SamplingHead.forward(self, *args, **kwargs)

    known = inspect.signature(model.forward).parameters.values()
    named = [p.replace(name=f"model_{p.name}") if p.name in HEAD_ARGUMENTS else p for p in known]
    of_model, others = ([p for p in named if (p.kind is p.VAR_KEYWORD) is rest] for rest in (False, True))
    of_head = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in HEAD_ARGUMENTS]
    of_head[0] = of_head[0].replace(default=inspect.Parameter.empty)  # the temperature has no default
    myself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([myself, *of_model, *of_head, *others])  # type: ignore[attr-defined]
    return forward


def sample_logits(logits, *, temperature, top_k=None, top_p=1.0, seed=None, min_p=None, **adjustments) -> torch.Tensor:
    """Draw tokens `[B]` int64 from logits `[B, V]`: `adjust_logits`, then `mlx::sample`.

    Each parameter is a number, a tensor of one element, or a tensor `[B]` with a value for each sequence. If one
    of them has shape `[B]`, each sequence draws the token that it would draw in a batch of 1. `temperature` <= 0
    is greedy decoding.
    These values have no effect: `top_p` >= 1, `top_k` <= 0 or >= V, and `min_p` <= 0. The same logits
    and `seed` give the same tokens. The caller must therefore pass another seed in every step. Without a
    seed, every call draws differently. `adjustments` are the arguments of `adjust_logits`.

    Raises TypeError or ValueError, with the name of the argument in the message.
    """
    return sample(
        adjust_logits(logits, **adjustments),
        _parameter("temperature", temperature, logits),
        _parameter("top_p", top_p, logits),
        _parameter_or_none("seed", seed, logits),
        _parameter_or_none("top_k", top_k, logits),
        _parameter_or_none("min_p", min_p, logits),
    )


def adjust_logits(
    logits,
    *,
    repetition_penalty=None,
    presence_penalty=None,
    frequency_penalty=None,
    history=None,
    history_valid=None,
    bias_tokens=None,
    bias_values=None,
    allowed_tokens=None,
) -> torch.Tensor:
    """Apply the logits processors to logits `[B, V]`.

    Returns float32, or `logits` unchanged if every parameter is None.

    - `repetition_penalty`, `presence_penalty`, `frequency_penalty`: numbers, tensors of one
      element, or tensors `[B]`. They apply to the tokens in `history` `[B, N]` int64. If `history_valid` `[B, N]` bool
      is given, only the entries count for which it is True. A repetition penalty r turns a logit x
      into x / r if x > 0, and into x * r otherwise; r = 1 has no effect. The presence penalty is
      subtracted once from the logit of each token in the history, and the frequency penalty once for
      each occurrence of the token; 0 has no effect.
    - `bias_tokens` int64 and `bias_values`, `[K]` or `[B, K]`: token ids, and the numbers that are added to
      their logits. The values of a repeated token add up. Ids outside the vocabulary are ignored.
    - `allowed_tokens` `[B, ceil(V / 32)]` int32: the mask of the tokens that may be drawn. Bit
      v % 32 of the integer at v // 32 belongs to token v, as in `llguidance`. If no allowed token of a
      sequence has a finite logit, the sequence gets token 0.

    Raises TypeError or ValueError, with the name of the argument in the message.
    """
    penalties = {
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    given = [name for name, value in penalties.items() if value is not None]
    _require_both(given[0] if given else "a penalty", bool(given), "history", history is not None)
    _require_both("bias_tokens", bias_tokens is not None, "bias_values", bias_values is not None)
    if given:
        values = [_parameter_or_none(name, value, logits) for name, value in penalties.items()]
        logits = penalize_logits(logits, history, history_valid, *values)
    elif history_valid is not None:
        raise TypeError("SamplingHead: history_valid: expected history as well")
    if bias_tokens is not None:
        logits = bias_logits(logits, bias_tokens, bias_values)
    if allowed_tokens is not None:
        logits = mask_logits(logits, allowed_tokens)
    return logits


def _require_both(name: str, given: bool, other: str, other_given: bool) -> None:
    if given != other_given:
        raise TypeError(f"SamplingHead: {name} and {other}: got only one of them, expected both or none")


def _last_logits(output) -> torch.Tensor:
    """Return the logits `[B, V]` of the last position in the output of a model.

    Raises TypeError if the output contains no logits, and ValueError if they have a wrong rank.
    """
    logits = output
    if isinstance(output, Mapping) and "logits" in output:
        logits = output["logits"]
    elif hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, torch.Tensor):
        raise TypeError(
            f"SamplingHead: model output: got {type(output).__name__}, expected a tensor of logits, "
            "a tuple that begins with one, or an output with .logits"
        )
    if logits.dim() not in (2, 3):
        raise ValueError(f"SamplingHead: logits: got shape {list(logits.shape)}, expected [B, S, V] or [B, V]")
    return logits[:, -1] if logits.dim() == 3 else logits


def _parameter_or_none(name: str, value, logits: torch.Tensor) -> torch.Tensor | None:
    return None if value is None else _parameter(name, value, logits)


def _parameter(name: str, value, logits: torch.Tensor) -> torch.Tensor:
    """Return `value` as a tensor of the parameter's dtype, 0-d or `[B]`, where `logits` are `[B, V]`.

    Raises TypeError for a float that is given for an integer parameter, or for anything but a real number.
    """
    dtype = getattr(torch, SCALARS[name].dtype)
    is_integer = not dtype.is_floating_point
    if isinstance(value, torch.Tensor):
        per_row = is_per_row(value)
        if value.shape != logits.shape[:1] if per_row else value.numel() != 1:
            raise ValueError(
                f"SamplingHead: {name}: got shape {list(value.shape)}, expected one element or {list(logits.shape[:1])}"
            )
        is_real = not value.is_complex() and value.dtype != torch.bool
        if is_real and not (is_integer and value.is_floating_point()):
            return (value if per_row or not value.dim() else value.reshape(())).to(dtype)
        received = value.dtype
    else:
        value = python_number(value)
        types = (int, torch.SymInt) if is_integer else (int, float, torch.SymInt, torch.SymFloat)
        if isinstance(value, types) and not isinstance(value, bool):
            return torch.full((), _signed(name, value) if is_integer else _float32(name, value), dtype=dtype)  # type: ignore[arg-type]
        received = type(value).__name__
    expected = "an integer" if is_integer else "a number"
    raise TypeError(f"SamplingHead: {name}: got {received}, expected {expected} or a tensor of one element")


def _signed(name: str, value: int) -> int:
    """Return `value` as a signed 64-bit integer. A seed may also be given as an unsigned one.

    Raises ValueError if `value` has more than 64 bits.
    """
    if not isinstance(value, int) or -(2**63) <= value < 2**63:
        return value
    if name != "seed" or not 0 <= value < 2**64:
        raise ValueError(f"SamplingHead: {name}: got {shown(value)}, expected 64 bits")
    return value - 2**64


def _float32(name: str, value: float) -> float:
    """Return `value`. Raises ValueError if it is a finite number that float32 cannot hold."""
    largest = torch.finfo(torch.float32).max
    if isinstance(value, (int, float)) and abs(value) > largest and value not in (math.inf, -math.inf):
        raise ValueError(f"SamplingHead: {name}: got {shown(value)}, expected a number of float32")
    return value
