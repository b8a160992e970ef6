"""The prompt of a completion, repeated before the answer."""

from __future__ import annotations

from .delta import Delta, Offsets, token_logprob
from .model import ServedModel
from .prompt_scores import PromptScores


class Echo:
    """A prompt that is repeated, perhaps with log probabilities. The choices of a prompt share it.

    - `text`: the prompt.
    - `scores`: the log probabilities of its tokens, or None.
    - `count`: the number of most likely tokens to return with each token.
    """

    def __init__(self, model: ServedModel, text: str, scores: PromptScores | None, count: int):
        self.text = text
        self._model, self._scores, self._count = model, scores, count
        self._delta: Delta | None = None

    async def delta(self) -> Delta:
        """Return the delta that repeats the prompt. Raises ApiError."""
        if self._delta is None:
            self._delta = await self._make_delta()
        return self._delta

    async def _make_delta(self) -> Delta:
        if self._scores is None:
            return Delta(text=self.text)
        llm, ids = self._model.llm, self._scores.ids
        # The tokens may have a space before the text, which some tokenizers add.
        excess = max(0, len(llm.text(ids)) - len(self.text))
        offsets, entries = Offsets(-excess), []
        for id, (logprob, top) in zip(ids, await self._scores.values(), strict=True):
            offset = max(0, offsets.take(llm.token_bytes(id)))
            entries.append(token_logprob(self._model, id, logprob, top[: self._count], offset))
        return Delta(text=self.text, logprobs=entries)
