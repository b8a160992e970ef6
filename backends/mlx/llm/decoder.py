"""A Hugging Face causal LM over caches of its own, as a program has it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .attention import use_cached_attention
from .cache import KVCache
from .rope import use_stateless_rotary


class CachedDecoder(torch.nn.Module):
    """`(tokens [B, S], input_pos [1], start [B] or None) -> logits [B, 1, V]` of the last position.

    `model` is taken over: it attends over the caches of this module from now on. `chunk` is
    the largest S; `window` is that of `layer_windows`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        batch: int = 1,
        max_seq_len: int,
        chunk: int | None = None,
        window: str | int = "auto",
    ):
        super().__init__()
        self.model = model
        self.batch, self.max_seq_len = batch, max_seq_len
        self.cache = KVCache.on(
            self,
            model.config.get_text_config(),
            batch=batch,
            capacity=max_seq_len,
            chunk=chunk or max_seq_len,
            dtype=model.dtype,
            window=window,
        )
        use_cached_attention(model, self.cache)
        use_stateless_rotary(model)

    def forward(
        self, tokens: torch.Tensor, input_pos: torch.Tensor, start: torch.Tensor | None = None
    ) -> torch.Tensor:
        positions = (torch.arange(tokens.shape[1], device=tokens.device) + input_pos).unsqueeze(0)
        if start is not None:
            positions = (positions - start.unsqueeze(1)).clamp(min=0)
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=self.cache.at(input_pos, start),
            use_cache=True,
            logits_to_keep=1,
        ).logits
        apart = sorted(set(range(len(self.cache.layers))) - self.cache.attended)
        if apart:
            raise ValueError(
                f"export_llm: {type(self.model).__name__} attends in a way of its own in layers "
                f"{', '.join(map(str, apart))}, expected the attention interface of transformers"
            )
        return logits
