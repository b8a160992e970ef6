"""The token history of a program: the tokens that the penalties count."""

from __future__ import annotations

import torch


class TokenHistory(torch.nn.Module):
    """Stores the token of every position in a mutable buffer of the program.

    `window` is the number of last tokens that the penalties count, at most `context`. The buffer
    `tokens` `[1, 1, rows * context, 1]` int64 has the layout of a KV cache with one head of size 1, so that
    it can be updated in place. A token is stored at its position in its row. A write at an earlier
    position therefore rewinds the history, and a write at position 0 starts a new one.

    Raises ValueError if `window` is out of range.
    """

    def __init__(self, rows: int, context: int, window: int):
        super().__init__()
        if not 1 <= window <= context:
            raise ValueError(f"TokenHistory: window: got {window}, expected 1 to {context}")
        self.rows, self.context, self.window = rows, context, window
        self.register_buffer("tokens", torch.zeros(1, 1, rows * context, 1, dtype=torch.int64))

    def write(self, tokens: torch.Tensor, input_pos: torch.Tensor, row: torch.Tensor | None = None) -> torch.Tensor:
        """Write `tokens` `[1, S]`, and return the buffer after that.

        `input_pos` and `row` are as in `CachedDecoder`. Positions beyond `context` are an error, as in the KV caches.
        """
        updated = torch.ops.mlx.cache_update(self.tokens, tokens.reshape(1, 1, -1, 1), input_pos, False, row, self.rows)
        self.tokens.copy_(updated)
        return updated

    def read(
        self, written: torch.Tensor, last: torch.Tensor, row: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the histories up to the positions `last` `[B]`, of the buffer that `write` returned.

        A history consists of the tokens at the last `window` positions, `[B, window]` int64, and a bool mask
        `[B, window]`, which is false for positions before 0.
        """
        positions = last.unsqueeze(1) - self.window + 1 + torch.arange(self.window, device=written.device)
        indices = positions.clamp(min=0)
        if row is not None:
            indices = row.unsqueeze(1) * self.context + indices
        return written.reshape(-1)[indices], positions >= 0


def last_positions(length: int, input_pos: torch.Tensor) -> torch.Tensor:
    """Return the last position of each row that a call writes: `length` tokens of one row, or a token of each."""
    return input_pos + (length - 1) if input_pos.shape[0] == 1 else input_pos
