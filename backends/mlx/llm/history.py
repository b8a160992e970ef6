"""The tokens of earlier positions, in the program: what the penalties look at."""

from __future__ import annotations

import torch


class TokenHistory(torch.nn.Module):
    """The tokens of every position, in a mutable buffer of the program.

    `tokens` `[batch, 1, context, 1]` int64 is laid out as a KV cache with one head of one
    number, so that an update is made in place. Tokens stand at their absolute positions:
    writing at an earlier position again rewinds, and position 0 begins anew.

    `window`: how many of the last tokens count, at most `context`. Raises ValueError.
    """

    def __init__(self, batch: int, context: int, window: int):
        super().__init__()
        if not 1 <= window <= context:
            raise ValueError(f"TokenHistory: window is {window}, expected 1 to {context}")
        self.window = window
        self.register_buffer("tokens", torch.zeros(batch, 1, context, 1, dtype=torch.int64))

    def update(
        self, tokens: torch.Tensor, input_pos: torch.Tensor, start: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `tokens` `[B, S]` at `input_pos` `[1]` and look back from the last of them.

        Returns the tokens of the last `window` positions, `[B, window]` int64, and which of
        them count, bool: those that are at least 0 and, with `start` `[B]` int64, not before
        it. All of a call's tokens count, prompts too. Refuses positions beyond `context`, as
        the KV caches do.
        """
        batch = self.tokens.shape[0]
        rows = torch.ops.mlx.cache_update(self.tokens, tokens.reshape(batch, 1, -1, 1), input_pos)
        self.tokens.copy_(rows)
        last = input_pos + (tokens.shape[1] - 1)
        positions = last - self.window + 1 + torch.arange(self.window, device=tokens.device)
        ids = rows.reshape(batch, -1).index_select(1, positions.clamp(min=0))
        first = torch.zeros_like(ids[:, :1]) if start is None else start.clamp(min=0).unsqueeze(1)
        return ids, positions.unsqueeze(0) >= first
