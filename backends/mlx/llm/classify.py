"""Which of some labels a prompt goes on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .batch import Rows
from .context import Context
from .program import WORD, LLMProgram
from .sampler import HeadSampler, Sampler
from .settings import Settings


@dataclass(frozen=True)
class Classification:
    """The likeliest label, and the probability of each among them; None where the program has
    no logits to tell. `error` says why there is no label."""

    label: str | None = None
    probabilities: dict[str, float] | None = None
    error: ValueError | None = None


class _Scores(Sampler):
    """Draws nothing: gives the logarithms of the probabilities of all tokens, `[V]` a row."""

    def draw(self, tokens, position, start, **_):
        return list(self.program.logits(tokens, position, start).float().log_softmax(-1))

    def feed(self, tokens, position, start):
        self.program.logits(tokens, position, start)


class Classifier:
    """Classifies over `labels`, each with the ids of its text.

    With logits the probability of a label is that of all its tokens, one after the other; a
    label of one token costs nothing beyond the prompt. With a head alone, which has to take
    `allowed_tokens`, the likeliest first token decides. Raises ValueError where that is not
    possible, or the labels are not all different.
    """

    def __init__(self, context: Context, labels: Mapping[str, Sequence[int]]):
        self.context, self.program, self.labels = context, context.program, labels
        if len(labels) < 2 or not all(labels.values()):
            raise ValueError(f"labels are {list(labels)}, expected two or more that are not empty")
        if len({tuple(ids) for ids in labels.values()}) < len(labels):
            raise ValueError(f"labels are {list(labels)}, of which some have the same tokens")
        self.mask = None if self.program.has_logits else self._mask()

    def _mask(self) -> torch.Tensor:
        name, first = self.program.path.name, [ids[0] for ids in self.labels.values()]
        if not self.program.takes("allowed_tokens"):
            raise ValueError(
                f"classify: {name} gives neither logits nor takes allowed_tokens; export it with "
                "logits, with both, or with allowed_tokens"
            )
        if len(set(first)) < len(first):
            raise ValueError(
                f"labels are {list(self.labels)}, of which some begin with the same token; to tell "
                f"them apart {name} has to be exported with logits"
            )
        return mask_of(self.program, first)

    def check(self, prompt: Sequence[int]) -> None:
        """ValueError if there is no room for the labels behind `prompt`."""
        room = self.program.context_len - max(map(len, self.labels.values())) + 1
        if not 0 < len(prompt) <= room:
            raise ValueError(f"the prompt has {len(prompt)} tokens, expected 1 to {room}")

    def classify(self, prompts: Sequence[Sequence[int]]) -> list[Classification]:
        """At most B prompts."""
        if not self.program.has_logits:
            names = {ids[0]: label for label, ids in self.labels.items()}
            with self._asking(prompts, HeadSampler(self.program, Settings())) as ask:
                return [Classification(names[first]) for first in ask([])]
        with self._asking(prompts, _Scores(self.program, Settings())) as ask:
            scores = self._scores(ask)
        shares = torch.stack(scores, -1).softmax(-1).tolist()
        return [_best(dict(zip(self.labels, row))) for row in shares]

    def _scores(self, ask: Callable[[list[int]], list[torch.Tensor]]) -> list[torch.Tensor]:
        """The logarithm of the probability of each label, for every prompt."""
        after: dict[tuple[int, ...], torch.Tensor] = {}
        scores = []
        for ids in self.labels.values():
            score = 0
            for i, token in enumerate(ids):
                begun = tuple(ids[:i])
                if begun not in after:
                    after[begun] = torch.stack(ask(list(begun)))
                score = score + after[begun][:, token]
            scores.append(score)
        return scores

    @contextmanager
    def _asking(self, prompts: Sequence[Sequence[int]], sampler: Sampler) -> Iterator[Callable]:
        """A function: what `sampler` gives for each prompt with some ids behind it."""
        if self.program.batch == 1:
            (prompt,) = prompts
            yield lambda more: [
                self.context.draw([*prompt, *more], sampler, step=0, allowed=self.mask).id
            ]
            return
        with self.context.lock:
            self.context.forget()
            rows = Rows(self.program, sampler, prompts)
            yield lambda more: rows.after(more, self.mask)[: len(prompts)]


def _best(probabilities: dict[str, float]) -> Classification:
    return Classification(max(probabilities, key=probabilities.__getitem__), probabilities)


def mask_of(program: LLMProgram, tokens: Sequence[int]) -> torch.Tensor:
    """The mask that allows `tokens` only, int32 `[B, ceil(V / 32)]`."""
    bits = torch.zeros(-(-program.vocab_size // WORD) * WORD, dtype=torch.int64)
    bits[list(tokens)] = 1
    words = (bits.reshape(-1, WORD) << torch.arange(WORD)).sum(-1)
    return words.to(torch.int32).expand(program.batch, -1).contiguous()
