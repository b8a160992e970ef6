"""A Hugging Face decoder whose KV caches are buffers of the program."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .attention import use_cached_attention
from .cache import KVCache, LayerSpec
from .complex_pairs import ComplexPairs
from .latent import absorb
from .observe import observe
from .rope import use_stateless_rotary
from .weights import compute_dtype


class CachedDecoder(torch.nn.Module):
    """`(tokens [1, S], input_pos, row or None) -> logits [1, 1 or S, V]` of the last position or of all.

    The caches have `rows` rows, each for one sequence. `input_pos` and `row` are int64. If their shape is `[1]`, the
    tokens are consecutive: `input_pos` is the position of the first of them, and `row` is their row. If the shape is
    `[S]`, each token has a position and a row of its own. `row` is None if there is one row.

    The constructor changes `model` in place, so that its layers attend over the caches of this module. It raises
    ValueError if a layer does something that a program cannot do over its caches.
    `chunk` is the largest S: by default, and at most, `max_context_len`. `window` is "auto" to follow the
    config of the model, or a number: the window of every layer, where 0 stands for no window. `specs` are the `specs`
    of another decoder with the same model, which saves finding them out. `ring_chunk` limits the chunk of a model with
    sliding windows, whose ring buffers grow with the chunk.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int = 1,
        max_context_len: int,
        chunk: int | None = None,
        window: str | int = "auto",
        specs: Sequence[LayerSpec | None] | None = None,
        ring_chunk: int | None = None,
    ):
        super().__init__()
        self.model = model
        self.rows, self.max_context_len = rows, max_context_len
        self.chunk = min(chunk or max_context_len, max_context_len)
        dtype = compute_dtype(model)
        absorb(model, dtype)
        use_stateless_rotary(model)
        self.specs = observe(model, self._logits, max_context_len, window) if specs is None else specs
        windows = [spec.pattern.window for spec in self.specs if spec is not None]
        if ring_chunk is not None and any(window is not None and window < max_context_len for window in windows):
            self.chunk = min(self.chunk, ring_chunk)
        self.cache = KVCache.register_on(
            self, self.specs, rows=rows, capacity=max_context_len, chunk=self.chunk, dtype=dtype
        )
        use_cached_attention(model, self.cache)

    def forward(
        self,
        tokens: torch.Tensor,
        input_pos: torch.Tensor,
        row: torch.Tensor | None = None,
        *,
        all_positions: bool = False,
    ) -> torch.Tensor:
        consecutive = input_pos.shape[0] == 1
        positions = torch.arange(tokens.shape[1], device=tokens.device) + input_pos if consecutive else input_pos
        cache = self.cache.begin_call(tokens.shape[1], input_pos, row)
        logits = self._logits(tokens, positions.unsqueeze(0), cache, all_positions=all_positions)
        if bypassed := sorted({layer.name for layer in cache.kv_layers} - cache.attended):
            raise ValueError(f"export_llm: model: {', '.join(bypassed)}: expected attention over the cache in every call")
        return logits

    def _logits(self, tokens, positions, cache, *, all_positions: bool = False) -> torch.Tensor:
        known = inspect.signature(self.model.forward).parameters
        options = {"position_ids": positions, "logits_to_keep": 0 if all_positions else 1}
        options = {name: value for name, value in options.items() if name in known}
        with ComplexPairs():
            logits = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **options).logits
        return logits if all_positions or "logits_to_keep" in known else logits[:, -1:]
