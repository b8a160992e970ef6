"""The log probabilities of the tokens of a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ..llm import BusyError
from ..llm.scoring import CancelledError
from .errors import request_error, server_error
from .model import ServedModel

RETRY_SECONDS = 0.05  # between two attempts to start a request while the queue is full
TOKENS_AT_ONCE = 64  # tokens whose scores are not lost if the queue is full

# Of each token: its log probability, and the most likely tokens in its place with theirs. The first token has none.
Values = Sequence[tuple[float | None, Sequence[tuple[int, float]]]]


class PromptScores:
    """The log probabilities of a prompt, computed when they are first needed. The choices of a prompt share them.

    - `ids`: the tokens of the prompt.
    - `count`: the number of most likely tokens to return with each token.

    The model can compute them; see `can_score`. Attribute: `computed`, the values of all tokens as soon as `values` has
    returned them, or None.
    """

    def __init__(self, model: ServedModel, ids: Sequence[int], count: int):
        self.ids, self.count = ids, count
        self.computed: Values | None = None
        self._model = model
        self._computing, self._is_cancelled = asyncio.Lock(), False

    def cancel(self) -> None:
        """End the computation soon: `values` raises ApiError."""
        self._is_cancelled = True

    async def values(self) -> Values:
        """Return the values of all tokens. Raises ApiError."""
        async with self._computing:
            if self.computed is None:
                loop = asyncio.get_running_loop()
                # Threads of its own: it may take long, and must not keep other requests from their start.
                self.computed = await loop.run_in_executor(self._model.scoring_threads, self._compute)
        return self.computed

    def _compute(self) -> Values:
        llm, ids = self._model.llm, self.ids
        options: dict[str, Any] = {"logprobs": self.count, "adapter": self._model.adapter}
        values: list[tuple[float | None, Sequence[tuple[int, float]]]] = [(None, ())]
        # With the method `verify`, one request scores the whole prompt. Others need a request for each token.
        step = max(1, len(ids) if llm.program.has_verify else TOKENS_AT_ONCE)
        while len(values) < len(ids):
            done = len(values)
            targets = [ids[done : done + step]]
            try:
                (score,) = llm.score(ids[:done], targets, **options, is_cancelled=lambda: self._is_cancelled)
            except BusyError:
                time.sleep(RETRY_SECONDS)
            except CancelledError as error:
                raise server_error("the server is shutting down", 503) from error
            except (ValueError, RuntimeError) as error:
                raise request_error(error, "prompt") from error
            else:
                values += zip(score.logprobs, score.top_logprobs)
        return values
