"""Classification: finds which of several labels is most likely to follow a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..sampling_parameters import MASK_WORD, SamplingParameters, mask_word_count
from .batch import PromptBatch
from .context import Context
from .program import LLMProgram
from .sampler import HeadSampler, Sampler


@dataclass(frozen=True)
class Classification:
    """The most likely label, and the probability of each label.

    `probabilities` is None if the program does not return logits. `error` is None if there is a label;
    otherwise it says why there is none.
    """

    label: str | None = None
    probabilities: dict[str, float] | None = None
    error: ValueError | None = None


class _LogProbabilities(Sampler):
    """A sampler whose `draw` draws no token, but returns the log-probabilities of all tokens, `[V]` per sequence."""

    def draw(self, tokens, position, start, **_):
        return list(self.program.logits(tokens, position, start).float().log_softmax(-1))

    def feed(self, tokens, position, start):
        self.program.logits(tokens, position, start)


class Classifier:
    """Classifies prompts. `labels` maps each label to its token ids.

    If the program returns logits, the probability of a label is the product of the probabilities of
    its tokens, normalized over the labels. A label of one token needs no call of the program beyond
    the one for the prompt. If the program returns only tokens, its head must take `allowed_tokens`. The
    head then draws the most likely of the labels' first tokens, which must differ.

    Raises ValueError if the labels are not distinct, or if the program neither returns logits nor takes
    `allowed_tokens`.
    """

    def __init__(self, context: Context, labels: Mapping[str, Sequence[int]]):
        self.context, self.program, self.labels = context, context.program, labels
        if len(labels) < 2 or not all(labels.values()):
            raise ValueError(f"labels: got {list(labels)}, expected at least two non-empty labels")
        if len({tuple(ids) for ids in labels.values()}) < len(labels):
            raise ValueError(f"labels: got {list(labels)}, expected different tokens for each label")
        self.mask = None if self.program.has_logits else self._mask_of_first_tokens()

    def _mask_of_first_tokens(self) -> torch.Tensor:
        """Return the mask that allows the first token of each label. Raises ValueError if it cannot be used."""
        name, first = self.program.path.name, [ids[0] for ids in self.labels.values()]
        if not self.program.takes("allowed_tokens"):
            raise ValueError(
                f"classify: {name} neither returns logits nor takes allowed_tokens; export it with "
                'outputs="logits" or "both", or with allowed_tokens in the head'
            )
        if len(set(first)) < len(first):
            raise ValueError(
                f"labels: got {list(self.labels)}, expected different first tokens; to compare all tokens, "
                f'export {name} with outputs="logits" or "both"'
            )
        return allow_only(self.program, first)

    def check(self, prompt: Sequence[int]) -> None:
        """Raise ValueError if the context has no room for the prompt and a label."""
        room = self.program.max_context_len - max(map(len, self.labels.values())) + 1
        if not 0 < len(prompt) <= room:
            raise ValueError(f"prompt: got {len(prompt)} tokens, expected 1 to {room}")

    def classify(self, prompts: Sequence[Sequence[int]]) -> list[Classification]:
        """Classify at most B prompts, and return their classifications in the same order."""
        if not self.program.has_logits:
            label_of = {ids[0]: label for label, ids in self.labels.items()}
            with self._draws_after(prompts, HeadSampler(self.program, SamplingParameters())) as draw_after:
                return [Classification(label_of[token]) for token in draw_after([])]
        with self._draws_after(prompts, _LogProbabilities(self.program, SamplingParameters())) as draw_after:
            scores = self._scores(draw_after)
        probabilities = torch.stack(scores, -1).softmax(-1).tolist()
        return [_most_likely(dict(zip(self.labels, values))) for values in probabilities]

    def _scores(self, draw_after: Callable[[list[int]], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return a tensor `[B]` for each label: the log-probability of the label after each prompt."""
        log_probabilities: dict[tuple[int, ...], torch.Tensor] = {}  # [B, V] after a prefix of a label
        scores = []
        for ids in self.labels.values():
            score = 0
            for i, token in enumerate(ids):
                prefix = tuple(ids[:i])
                if prefix not in log_probabilities:
                    log_probabilities[prefix] = torch.stack(draw_after(list(prefix)))
                score = score + log_probabilities[prefix][:, token]
            scores.append(score)
        return scores

    @contextmanager
    def _draws_after(self, prompts: Sequence[Sequence[int]], sampler: Sampler) -> Iterator[Callable]:
        """A context manager that yields a function `draw_after(suffix)`.

        The function returns what `sampler` draws after each prompt followed by `suffix`.
        """
        if self.program.batch == 1:
            (prompt,) = prompts
            yield lambda suffix: [
                self.context.draw([*prompt, *suffix], sampler, step=0, allowed=self.mask).id
            ]
            return
        with self.context.lock:
            self.context.invalidate()
            batch = PromptBatch(self.program, sampler, prompts)
            yield lambda suffix: batch.draw_after(suffix, self.mask)[: len(prompts)]


def _most_likely(probabilities: dict[str, float]) -> Classification:
    return Classification(max(probabilities, key=probabilities.__getitem__), probabilities)


def allow_only(program: LLMProgram, tokens: Sequence[int]) -> torch.Tensor:
    """Return the mask that allows only `tokens`, int32 `[B, ceil(V / 32)]`."""
    bits = torch.zeros(mask_word_count(program.vocab_size) * MASK_WORD, dtype=torch.int64)
    bits[list(tokens)] = 1
    words = (bits.reshape(-1, MASK_WORD) << torch.arange(MASK_WORD)).sum(-1)
    return words.to(torch.int32).expand(program.batch, -1).contiguous()
