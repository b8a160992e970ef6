"""A Hugging Face decoder whose KV caches are buffers of the program."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .attention import use_cached_attention
from .cache import KVCache
from .rope import use_stateless_rotary
from .weights import compute_dtype


class CachedDecoder(torch.nn.Module):
    """`(tokens [B, S], input_pos [1], start [B] or None) -> logits [B, 1, V]` of the last position.

    `input_pos` is the position of the first of the tokens. `start[b]` is the number of padding positions
    at the left of sequence b.

    The constructor changes `model` in place, so that its layers attend over the caches of this module.
    `chunk` is the largest S: by default, and at most, `max_context_len`. `window` is "auto" to follow the
    config of the model, or a number: the window of every layer, where 0 stands for no window.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        batch: int = 1,
        max_context_len: int,
        chunk: int | None = None,
        window: str | int = "auto",
    ):
        super().__init__()
        self.model = model
        self.batch, self.max_context_len, self.window = batch, max_context_len, window
        self.chunk = min(chunk or max_context_len, max_context_len)
        self.cache = KVCache.register_on(
            self,
            model.config.get_text_config(),
            batch=batch,
            capacity=max_context_len,
            chunk=self.chunk,
            dtype=compute_dtype(model),
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
            past_key_values=self.cache.begin_call(input_pos, start),
            use_cache=True,
            logits_to_keep=1,
        ).logits
        bypassed = sorted(set(range(len(self.cache.layers))) - self.cache.attended)
        if bypassed:
            raise ValueError(
                f"export_llm: model: {type(self.model).__name__} has its own attention in layers "
                f"{', '.join(map(str, bypassed))}, expected the attention interface of transformers"
            )
        return logits
