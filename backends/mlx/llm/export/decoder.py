"""A Hugging Face decoder whose KV caches are buffers of the program."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from .attention import use_cached_attention
from .cache import KVCache
from .recurrent import cache_argument, kernels_of, use_cached_states
from .rope import use_stateless_rotary
from .state import StateCache, has_state
from .weights import compute_dtype


class CachedDecoder(torch.nn.Module):
    """`(tokens [1, S], input_pos, row or None) -> logits [1, 1 or S, V]` of the last position or of all.

    The caches have `rows` rows, each for one sequence. `input_pos` and `row` are int64. If their shape is `[1]`, the
    tokens are consecutive: `input_pos` is the position of the first of them, and `row` is their row. If the shape is
    `[S]`, each token has a position and a row of its own. `row` is None if there is one row.

    The constructor changes `model` in place, so that its layers attend over the caches of this module.
    `chunk` is the largest S: by default, and at most, `max_context_len`. `window` is "auto" to follow the
    config of the model, or a number: the window of every layer, where 0 stands for no window.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int = 1,
        max_context_len: int,
        chunk: int | None = None,
        window: str | int = "auto",
    ):
        super().__init__()
        self.model = model
        self.rows, self.max_context_len, self.window = rows, max_context_len, window
        self.chunk = min(chunk or max_context_len, max_context_len)
        config = model.config.get_text_config()
        caches = dict(
            rows=rows, capacity=max_context_len, chunk=self.chunk, dtype=compute_dtype(model), window=window
        )
        self.has_state = has_state(config)
        if self.has_state:
            use_cached_states(model)
            self.cache = StateCache.register_on(self, model, **caches)
        else:
            if not hasattr(config, "num_attention_heads"):
                raise ValueError(
                    f"export_llm: model: the config of {config.model_type} has no num_attention_heads, expected a "
                    "decoder with attention or with states that a cache holds"
                )
            self.cache = KVCache.register_on(self, config, **caches)
        use_cached_attention(model, self.cache)
        use_stateless_rotary(model)

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
        positions = positions.unsqueeze(0)
        self.cache.begin_call(input_pos, row)
        is_batch = self.has_state and not consecutive  # a state needs the tokens of different rows apart
        if is_batch:
            tokens, positions = tokens.mT, positions.mT
        with self._kernels():
            logits = self.model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=0 if all_positions else 1,
                **{cache_argument(self.model): self.cache},
            ).logits
        self._check_layers()
        if self.has_state:
            self.cache.end_call()
        return logits.transpose(0, 1) if is_batch else logits

    def _kernels(self) -> AbstractContextManager:
        return kernels_of(self.model, self.cache) if self.has_state else nullcontext()

    def _check_layers(self) -> None:
        """Raises ValueError if a layer did not use the cache in the current call."""
        bypassed = sorted(set(range(len(self.cache.layers))) - self.cache.attended - self.cache.without_keys)
        if bypassed:
            raise ValueError(
                f"export_llm: model: {type(self.model).__name__} has its own attention in layers "
                f"{', '.join(map(str, bypassed))}, expected the attention interface of transformers"
            )
