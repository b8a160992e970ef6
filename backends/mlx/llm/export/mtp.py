"""Multi-token prediction in a program: the head that guesses the token after the next one, with a cache of its own.

`checkpoints.head` loads the head.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from .attention.cache import KVCache, lazy_zeros
from .attention.cached import use_cached_attention
from .attention.latent import absorb
from .attention.observe import observe
from .precision import compute_dtype


@contextmanager
def without_ends(head: MtpModel):
    """Within the context, `head` lacks the embeddings and the output projection, which it shares with the model."""
    ends = head.embed_tokens, head.shared_head
    head.embed_tokens = head.shared_head = None
    try:
        yield head
    finally:
        head.embed_tokens, head.shared_head = ends


class MTPDecoder(torch.nn.Module):
    """`(tokens [1, S], input_pos [1], row [1] or None, row_length [1]) -> logits [1, 1, V]` after the last token.

    The head combines the hidden state that the model computed for a position p with the token at p + 1, and predicts
    the token at p + 2. `input_pos` is the position p of the first hidden state. `tokens` are therefore the tokens from
    position `input_pos + 1` on. The head keeps keys and values of its own; those of the pair (p, p + 1) are at
    position p.

    `record` stores hidden states that the model has computed. `row_length` [1] is the number of hidden
    states that it has stored for the row. A call also stores the hidden state that the head itself computes for the
    last token, behind those of the model. The next call can then guess one more token before the model has computed
    this state.
    """

    def __init__(self, head: MtpModel, model: PreTrainedModel, *, rows: int, max_context_len: int, chunk: int):
        super().__init__()
        head.tie_with_main_model(model)
        dtype = compute_dtype(model)
        absorb(head, dtype)
        self.head, self.rows, self.max_context_len = head, rows, max_context_len
        size = head.config.hidden_size

        def call(tokens, positions, cache):
            head.forward_layer(0, torch.zeros(*tokens.shape, size, dtype=dtype), positions, cache, input_ids=tokens)

        specs = observe(head, call, max_context_len)
        self.cache = KVCache.register_on(self, specs, rows=rows, capacity=max_context_len, chunk=chunk, dtype=dtype)
        self.register_buffer("hidden", lazy_zeros((1, 1, rows * max_context_len, size), dtype))
        use_cached_attention(head, self.cache)

    def record(self, states: torch.Tensor, position: torch.Tensor, row: torch.Tensor | None) -> None:
        """Store the hidden states [1, S, H] of tokens. `position` and `row` are as in `CachedDecoder`."""
        updated = torch.ops.mlx.cache_update(
            self.hidden, states[None].to(self.hidden.dtype), position, False, row, self.rows
        )
        self.hidden.copy_(updated)

    def forward(self, tokens, input_pos, row, row_length) -> torch.Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device) + input_pos
        indices = positions if row is None else positions + row * self.max_context_len
        states = self.hidden[0, 0].index_select(0, indices)[None]
        cache = self.cache.begin_call(length, input_pos, row)
        states = self.head.forward_layer(0, states, positions[None] + 1, cache, input_ids=tokens)[:, -1:]
        self.record(states, torch.maximum(input_pos + length, row_length), row)
        return self.head._project_to_logits(states)

    @property
    def bytes(self) -> int:
        """The size of all buffers together, in bytes."""
        return self.cache.bytes + self.hidden.nbytes
