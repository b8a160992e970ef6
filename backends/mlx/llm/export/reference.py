"""Compares a decoder over the caches of a program with the model of `transformers` that it was made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .attention import use_cached_attention
from .decoder import CachedDecoder
from .weights import compute_dtype

_SEED = 21
_LENGTH = 24  # tokens of the prompt
_FIRST = 16  # tokens of the first of two calls
_TOLERANCE = {torch.float32: 2e-3}  # of the root mean square of the logits
_HALF_TOLERANCE = 0.1


@dataclass(frozen=True)
class Reference:
    """The logits `[S, V]` of a model on the prompt `tokens` [1, S], computed before the model was changed."""

    tokens: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, length: int) -> Reference:
        """Run `model` on a prompt of random tokens, of at most `length` tokens."""
        vocab_size = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(vocab_size, (1, min(_LENGTH, length)), generator=generator)
        with torch.no_grad():
            return cls(tokens, model(input_ids=tokens, use_cache=False).logits[0].float())

    def check(self, decoder: CachedDecoder) -> None:
        """Raise ValueError if the decoder gives other logits, beyond rounding. It takes the prompt in two calls."""
        small = CachedDecoder(decoder.model, max_context_len=self.tokens.shape[1], specs=decoder.specs).eval()
        first, *rest = self.tokens.split(_FIRST, 1)
        with torch.no_grad():
            parts = [small(first, torch.tensor([0]))[0]]  # only the logits of the last token
            parts += [small(tokens, torch.tensor([_FIRST]), all_positions=True)[0] for tokens in rest]
        use_cached_attention(decoder.model, decoder.cache)  # in place of the small caches
        difference = (torch.cat(parts).float() - self.logits[first.shape[1] - 1 :]).abs().max().item()
        scale = (self.logits - self.logits.mean()).square().mean().sqrt().item()
        if not difference <= _TOLERANCE.get(compute_dtype(decoder.model), _HALF_TOLERANCE) * scale:
            layers = ", ".join(sorted({layer.name.split(" of ")[0] for layer in decoder.cache.kv_layers}))
            raise ValueError(
                f"export_llm: model: {type(decoder.model).__name__} ({layers}) gives other logits over the caches of a "
                f"program than in transformers: the largest difference is {difference:.1e}, their size is {scale:.1e}"
            )
