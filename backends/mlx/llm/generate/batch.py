"""Many prompts: side by side as the sequences of one program, or one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .context import Context
from .generate import AnswerBuilder, Result, check_prompt
from .metrics import Metrics
from .program import LLMProgram
from .sampler import Sampler

PADDING = 0  # the token id of padding; any id works, because no token attends to the padding


class PromptBatch:
    """Up to B prompts that are in the KV cache side by side, padded on the left to equal length.

    If there are fewer than B prompts, the unused sequences repeat the first prompt. The caller must hold
    the lock of the `Context` of `program`.
    """

    def __init__(self, program: LLMProgram, sampler: Sampler, prompts: Sequence[Sequence[int]]):
        self.program, self.sampler = program, sampler
        self.ids = [list(prompt) for prompt in prompts]
        self.ids += [list(prompts[0]) for _ in range(program.batch - len(prompts))]
        self.position = 0
        self.width = max(map(len, self.ids))
        self.start = [self.width - len(ids) for ids in self.ids]

    @property
    def is_full(self) -> bool:
        return self.position == self.program.max_context_len

    def padded_prompts(self) -> torch.Tensor:
        """Return the prompts with their padding, `[B, width]` int64."""
        return torch.tensor([[PADDING] * n + ids for n, ids in zip(self.start, self.ids)])

    def draw(
        self, tokens: torch.Tensor, step: int, allowed: torch.Tensor | None = None
    ) -> list[Any]:
        """Write `tokens` `[B, S]` to the cache, draw the next token of each sequence, and return what was drawn."""
        *chunks, last = tokens.split(self.program.chunk, dim=1)
        for chunk in chunks:
            self.sampler.feed(chunk, self.position, self.start)
            self.position += chunk.shape[1]
        drawn = self.sampler.draw(
            last, self.position, self.start, step=step, sequences=self.ids, allowed=allowed
        )
        self.position += last.shape[1]
        return drawn

    def draw_after(self, suffix: Sequence[int], allowed: torch.Tensor | None = None) -> list[Any]:
        """Draw the token that follows each prompt and then `suffix`, and return what was drawn.

        In the first call, `suffix` must be empty. That call writes the prompts to the cache, and later
        calls reuse them.
        """
        if not suffix:
            self.position = 0
            return self.draw(self.padded_prompts(), 0, allowed)
        self.position = self.width
        return self.draw(torch.tensor([suffix]).expand(self.program.batch, -1), 0, allowed)

    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append one of `tokens` to each sequence, and return `tokens` as a tensor `[B, 1]`."""
        for ids, token in zip(self.ids, tokens):
            ids.append(token)
        return torch.tensor(tokens, dtype=torch.int64).unsqueeze(1)


def generate_side_by_side(
    context: Context,
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[AnswerBuilder],
) -> list[Result]:
    """Generate and return the answers to at most B valid prompts. `answers[i]` collects the tokens for `prompts[i]`."""
    batch = PromptBatch(context.program, sampler, prompts)
    metrics = [Metrics(prompt_tokens=len(prompt)) for prompt in prompts]
    with context.lock:
        context.invalidate()
        tokens, step = batch.padded_prompts(), 0
        while any(answer.finish is None for answer in answers):
            begin = time.perf_counter()
            drawn = batch.draw(tokens, step)
            seconds = time.perf_counter() - begin
            for index, answer in enumerate(answers):
                if answer.finish is None:
                    answer.take(drawn[index], not batch.is_full)
                    metrics[index].count_token(seconds)
            tokens, step = batch.append(drawn), step + 1
    return [
        Result(answer.text, answer.tokens, answer.finish, metric, sampler.seed)
        for answer, metric in zip(answers, metrics)
    ]


def run_in_groups(
    program: LLMProgram,
    prompts: Sequence[Any],
    encode: Callable[[Any], list[int]],
    run: Callable[[list[list[int]]], Sequence],
    on_error: Callable[[ValueError], Any],
) -> list:
    """Call `run` for groups of at most B prompts, and return all results in the order of `prompts`.

    `encode` turns a prompt into token ids, and `run` returns the results for the ids of a group. The
    prompts of a group have similar lengths. If `encode` raises ValueError for a prompt, or the ids are
    not valid, the result for this prompt is `on_error(error)`.
    """
    results: list = [None] * len(prompts)
    valid: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        try:
            ids = encode(prompt)
            check_prompt(program, ids)
            valid[index] = ids
        except ValueError as error:
            results[index] = on_error(error)
    by_length = sorted(valid, key=lambda index: len(valid[index]))
    for first in range(0, len(by_length), program.batch):
        group = by_length[first : first + program.batch]
        for index, result in zip(group, run([valid[index] for index in group])):
            results[index] = result
    return results
