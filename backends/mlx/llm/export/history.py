"""The token history of a program: the tokens that the penalties count."""

from __future__ import annotations

import torch


class TokenHistory(torch.nn.Module):
    """Stores the token of every position in a mutable buffer of the program.

    `window` is the number of last tokens that the penalties count, at most `context`. The buffer
    `tokens` `[batch, 1, context, 1]` int64 has the layout of a KV cache with one head of size 1, so that
    it can be updated in place. A token is stored at its position in the sequence. A write at an earlier
    position therefore rewinds the history, and a write at position 0 starts a new one.

    Raises ValueError if `window` is out of range.
    """

    def __init__(self, batch: int, context: int, window: int):
        super().__init__()
        if not 1 <= window <= context:
            raise ValueError(f"TokenHistory: window: got {window}, expected 1 to {context}")
        self.window = window
        self.register_buffer("tokens", torch.zeros(batch, 1, context, 1, dtype=torch.int64))

    def update(
        self, tokens: torch.Tensor, input_pos: torch.Tensor, start: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `tokens` `[B, S]` at position `input_pos` `[1]`, and return the history up to the last of them.

        Returns the tokens of the last `window` positions, `[B, window]` int64, and a bool mask of those that count.
        Prompt tokens count, but padding does not. `start[b]` is the number of padding positions at the left of
        sequence b, int64 `[B]`; None stands for no padding. Positions beyond `context` are an error, as in the KV
        caches.
        """
        batch = self.tokens.shape[0]
        updated = torch.ops.mlx.cache_update(self.tokens, tokens.reshape(batch, 1, -1, 1), input_pos)
        self.tokens.copy_(updated)
        last = input_pos + (tokens.shape[1] - 1)
        positions = last - self.window + 1 + torch.arange(self.window, device=tokens.device)
        ids = updated.reshape(batch, -1).index_select(1, positions.clamp(min=0))
        padding = torch.zeros_like(ids[:, :1]) if start is None else start.clamp(min=0).unsqueeze(1)
        return ids, positions.unsqueeze(0) >= padding
