"""Many prompts: side by side in the rows of one program, or one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from .context import Context
from .generate import Answer, Result, check_prompt
from .metrics import Metrics
from .program import LLMProgram
from .sampler import Sampler

PADDING = 0  # any token does: it is not attended


class Rows:
    """Up to B prompts in the rows of the KV cache, the shorter ones padded on the left.

    The cache is theirs as long as the context's lock is held. A row without a prompt repeats
    the first one.
    """

    def __init__(self, program: LLMProgram, sampler: Sampler, prompts: Sequence[Sequence[int]]):
        self.program, self.sampler = program, sampler
        self.ids = [list(prompt) for prompt in prompts]
        self.ids += [list(prompts[0]) for _ in range(program.batch - len(prompts))]
        self.position = 0
        self.width = max(map(len, self.ids))
        self.start = [self.width - len(ids) for ids in self.ids]

    @property
    def full(self) -> bool:
        return self.position == self.program.context_len

    def prompt(self) -> torch.Tensor:
        """`[B, width]`"""
        return torch.tensor([[PADDING] * n + ids for n, ids in zip(self.start, self.ids)])

    def draw(
        self, tokens: torch.Tensor, step: int, allowed: torch.Tensor | None = None
    ) -> list[int]:
        """Writes `tokens` `[B, S]`; the next token of every row."""
        *before, last = tokens.split(self.program.max_seq_len, dim=1)
        for piece in before:
            self.sampler.feed(piece, self.position, self.start)
            self.position += piece.shape[1]
        drawn = self.sampler.draw(
            last, self.position, self.start, step=step, rows=self.ids, allowed=allowed
        )
        self.position += last.shape[1]
        return drawn

    def after(self, more: Sequence[int], allowed: torch.Tensor | None = None) -> list:
        """What is drawn after each prompt with `more` behind it: the prompts stay in the cache."""
        if not more:
            self.position = 0
            return self.draw(self.prompt(), 0, allowed)
        self.position = self.width
        return self.draw(torch.tensor([more]).expand(self.program.batch, -1), 0, allowed)

    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        """One more token for every row, as `[B, 1]`."""
        for ids, token in zip(self.ids, tokens):
            ids.append(token)
        return torch.tensor(tokens, dtype=torch.int64).unsqueeze(1)


def generate_rows(
    context: Context,
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
) -> list[Result]:
    """The answers to at most B prompts that fit; `answers` take the tokens."""
    rows = Rows(context.program, sampler, prompts)
    metrics = [Metrics(prompt_tokens=len(prompt)) for prompt in prompts]
    with context.lock:
        context.forget()
        tokens, step = rows.prompt(), 0
        while any(answer.finish is None for answer in answers):
            begin = time.perf_counter()
            drawn = rows.draw(tokens, step)
            seconds = time.perf_counter() - begin
            for index, answer in enumerate(answers):
                if answer.finish is None:
                    answer.take(drawn[index], not rows.full)
                    _count(metrics[index], seconds)
            tokens, step = rows.append(drawn), step + 1
    return [
        Result(answer.text, answer.tokens, answer.finish, metric, sampler.seed)
        for answer, metric in zip(answers, metrics)
    ]


def _count(metrics: Metrics, seconds: float) -> None:
    if metrics.generated_tokens == 0:
        metrics.prompt_seconds = seconds
    else:
        metrics.generation_seconds += seconds
    metrics.generated_tokens += 1


def in_groups(
    program: LLMProgram,
    prompts: Sequence[Callable[[], list[int]]],
    run: Callable[[list[list[int]]], Sequence],
    failed: Callable[[ValueError], object],
) -> list:
    """`run` for groups of at most B prompts, long ones apart from short; results in their order.

    `prompts` give the ids; one that raises ValueError, or does not fit, gets `failed(error)` in
    its place among the results.
    """
    results: list = [None] * len(prompts)
    sound: dict[int, list[int]] = {}
    for place, ask in enumerate(prompts):
        try:
            ids = ask()
            check_prompt(program, ids)
            sound[place] = ids
        except ValueError as error:
            results[place] = failed(error)
    order = sorted(sound, key=lambda place: len(sound[place]))
    for first in range(0, len(order), program.batch):
        group = order[first : first + program.batch]
        for place, result in zip(group, run([sound[place] for place in group])):
            results[place] = result
    return results
