"""Compares a decoder over the caches of a program with the model of `transformers` that it was made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .attention.cached import use_cached_attention
from .decoder import CachedDecoder
from .precision import compute_dtype

_SEED = 21
_LENGTH = 24  # the number of tokens in the prompt
_FIRST = 16  # how many of these tokens the first of two calls takes
# The tolerances for float32 and half precision, relative to the standard deviation of the logits.
_FLOAT32_TOLERANCE, _HALF_TOLERANCE = 2e-3, 0.1
_ROUNDING = 2.0**-8  # the relative size of changes of the embeddings, about a rounding error in bfloat16
_NOISE_RUNS = 2  # the number of runs with changed embeddings
_NOISE_FACTOR = 2  # in half precision, the tolerance is at least this factor times the largest change in these runs


@dataclass(frozen=True)
class Reference:
    """The logits `[S, V]` of a model on the prompt `tokens` [1, S], computed before the model was changed.

    `noise` is the largest change of a logit when the embeddings are changed as by rounding; 0 for a float32 model. In
    half precision, a recurrence or a choice of experts can amplify rounding errors to the size of the logits.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    noise: float = 0

    @classmethod
    def of(cls, model: PreTrainedModel, length: int) -> Reference:
        """Run `model` on a prompt of random tokens, of at most `length` tokens."""
        vocab_size = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(vocab_size, (1, min(_LENGTH, length)), generator=generator)
        logits = _logits(model, tokens)
        if compute_dtype(model) == torch.float32:
            return cls(tokens, logits)

        def round_differently(_, __, y):
            return y * (1 + _ROUNDING * torch.randn(y.shape, generator=generator)).to(y.dtype)

        handle = model.get_input_embeddings().register_forward_hook(round_differently)
        try:
            noise = max((_logits(model, tokens) - logits).abs().max().item() for _ in range(_NOISE_RUNS))
        finally:
            handle.remove()
        return cls(tokens, logits, noise)

    def check(self, decoder: CachedDecoder) -> None:
        """Run `decoder` on the prompt, in two calls. Raise ValueError if its logits differ by more than rounding."""
        small = CachedDecoder(decoder.model, max_context_len=self.tokens.shape[1], specs=decoder.specs).eval()
        first, *rest = self.tokens.split(_FIRST, 1)
        with torch.no_grad():
            parts = [small(first, torch.tensor([0]))[0]]  # only the logits of the last token
            parts += [small(tokens, torch.tensor([_FIRST]), all_positions=True)[0] for tokens in rest]
        use_cached_attention(decoder.model, decoder.cache)  # in place of the small caches
        expected = self.logits[first.shape[1] - 1 :]
        difference = difference_beyond_rounding(
            torch.cat(parts).float(), expected, decoder.model, scale=_standard_deviation(self.logits), noise=self.noise
        )
        if difference:
            layers = ", ".join(sorted({layer.name.split(" of ")[0] for layer in decoder.cache.kv_layers}))
            raise ValueError(
                f"export_llm: model: {type(decoder.model).__name__} ({layers}) gives other logits over the caches of a "
                f"program than in transformers: {difference}"
            )


def difference_beyond_rounding(
    logits: torch.Tensor,
    expected: torch.Tensor,
    model: PreTrainedModel,
    *,
    scale: float | None = None,
    noise: float = 0,
) -> str:
    """Return a description of the largest difference between `logits` and `expected`, or "" if rounding can explain it.

    `model` is the model that computed both. `scale` is the standard deviation of the logits, by default that of
    `expected`. `noise` is as in `Reference`.
    """
    scale = _standard_deviation(expected) if scale is None else scale
    difference = (logits - expected).abs().max().item()
    is_float32 = compute_dtype(model) == torch.float32
    tolerance = _FLOAT32_TOLERANCE * scale if is_float32 else max(_HALF_TOLERANCE * scale, _NOISE_FACTOR * noise)
    return "" if difference <= tolerance else f"the largest difference is {difference:.1e}, their size is {scale:.1e}"


def _standard_deviation(logits: torch.Tensor) -> float:
    return (logits - logits.mean()).square().mean().sqrt().item()


def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    try:
        with torch.no_grad():
            return model(input_ids=tokens, use_cache=False).logits[0].float()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"export_llm: model: {type(model).__name__} cannot run over the tokens of a text alone: {error!r}"
        ) from error
