"""The prompt of a completion, repeated before the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ..llm import BusyError
from .answer import RETRY_SECONDS, Delta, Offsets, token_logprob
from .errors import request_error, server_error
from .model import ServedModel

TOKENS_AT_ONCE = 64  # tokens that are scored between two looks at whether the answer was cancelled


class Echo:
    """A prompt that is repeated, perhaps with log probabilities. The choices of a prompt share it.

    - `text`, `ids`: the prompt.
    - `logprobs`: the number of most likely tokens to return with each token, or None for no log probabilities. The
      model can compute them; see `can_score`.
    """

    def __init__(self, model: ServedModel, text: str, ids: Sequence[int], logprobs: int | None):
        self.text = text
        self._model, self._ids, self._logprobs = model, ids, logprobs
        self._delta = Delta(text=text) if logprobs is None else None
        self._computing, self._is_cancelled = asyncio.Lock(), False

    def cancel(self) -> None:
        """End the computation soon: `delta` raises ApiError."""
        self._is_cancelled = True

    async def delta(self) -> Delta:
        """Return the delta that repeats the prompt. Raises ApiError."""
        async with self._computing:
            if self._delta is None:
                loop = asyncio.get_running_loop()
                # Threads of its own: it may take long, and must not keep other requests from their start.
                self._delta = await loop.run_in_executor(self._model.scoring_threads, self._compute)
        return self._delta

    def _compute(self) -> Delta:
        llm, ids = self._model.llm, self._ids
        values: list[tuple[float | None, Sequence[tuple[int, float]]]] = [(None, ())]
        # With the method `verify`, a few calls score the whole prompt.
        step = max(1, len(ids) if llm.program.has_verify else TOKENS_AT_ONCE)
        while len(values) < len(ids):
            if self._is_cancelled:
                raise server_error("the server is shutting down", 503)
            done = len(values)
            try:
                (score,) = llm.score(ids[:done], [ids[done : done + step]], logprobs=self._logprobs)
            except BusyError:
                time.sleep(RETRY_SECONDS)
            except (ValueError, RuntimeError) as error:
                raise request_error(error, "prompt") from error
            else:
                values += zip(score.logprobs, score.top_logprobs)
        # The tokens may have a space before the text, which some tokenizers add.
        excess = max(0, len(llm.text(ids)) - len(self.text))
        offsets, entries = Offsets(-excess), []
        for id, (logprob, top) in zip(ids, values, strict=True):
            offset = max(0, offsets.take(llm.token_bytes(id)))
            entries.append(token_logprob(self._model, id, logprob, top, offset))
        return Delta(text=self.text, logprobs=entries)
