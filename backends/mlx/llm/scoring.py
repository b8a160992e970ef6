"""Computes the log probabilities of given continuations of a prompt, and classifies prompts by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .generation import Generation, Options, Token
from .program import LLMProgram
from .sampling_parameters import TOKENS_PER_MASK_WORD, SamplingParameters, mask_word_count


@dataclass(frozen=True)
class Score:
    """How likely a continuation is, by the model's own distribution: temperature 1, no filters and no penalties.

    - `logprob`: the log probability of the whole continuation, the sum of `logprobs`.
    - `is_greedy`: whether greedy decoding would draw exactly these tokens.
    - `tokens`, `logprobs`: the token ids, and the log probability of each of them.
    - `top_logprobs`: for each of `tokens`, the most likely tokens in its place and their log probabilities, in
      descending order.
    """

    logprob: float
    is_greedy: bool
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Classification:
    """The most likely label, and the probability of each label.

    `probabilities` is None if the program can only draw tokens. `error` is None if there is a label; otherwise it says
    why there is none.
    """

    label: str | None = None
    probabilities: dict[str, float] | None = None
    error: ValueError | None = None


def can_score(program: LLMProgram) -> bool:
    """Whether the program can compute the log probability of a given token."""
    return program.has_logits or bool(program.logprobs) and (program.has_verify or program.takes("allowed_tokens"))


def score(program: LLMProgram, prompt: Sequence[int], continuation: Sequence[int], top: int = 0) -> Score:
    """Score a continuation of a prompt, both given as token ids. `top` is the number of most likely tokens to return.

    A program with log probabilities and the method `verify` scores many tokens in one call. Other programs need a call
    for each token.
    """
    top_logprobs: list[tuple]
    if program.has_verify and program.logprobs and (top <= program.logprobs or not program.has_logits):
        logprobs, is_greedy = program.score(prompt, continuation)
        top_logprobs = program.score_top(prompt, continuation, top) if top else [()] * len(continuation)
    else:
        logprobs, is_greedy, top_logprobs = [], [], []
        for i, token in enumerate(continuation):
            drawn = _draw_only(program, [*prompt, *continuation[:i]], [token], max(top, 1))
            # Another token was drawn if `token` has a probability of 0, or none at all.
            logprobs.append(drawn.logprob if drawn.id == token else -math.inf)
            is_greedy.append(drawn.id == token == drawn.top_logprobs[0][0])
            top_logprobs.append(drawn.top_logprobs[:top])
    return Score(sum(logprobs), all(is_greedy), list(continuation), logprobs, top_logprobs)


class Classifier:
    """Classifies prompts. `labels` maps each label to its token ids.

    The probability of a label is the product of the probabilities of its tokens, normalized over the labels. If the
    program can only draw tokens, its head must take `allowed_tokens`. It then draws the most likely of the first tokens
    of the labels. These first tokens must differ.

    Raises ValueError if the labels are not distinct, or if the program can neither score nor take `allowed_tokens`.
    """

    def __init__(self, program: LLMProgram, labels: Mapping[str, Sequence[int]]):
        self.program, self.labels = program, labels
        if len(labels) < 2 or not all(labels.values()):
            raise ValueError(f"labels: got {list(labels)}, expected at least two non-empty labels")
        if len({tuple(ids) for ids in labels.values()}) < len(labels):
            raise ValueError(f"labels: got {list(labels)}, expected different tokens for each label")
        self._can_score = can_score(program)
        if not self._can_score:
            self._check_first_tokens()

    def _check_first_tokens(self) -> None:
        name, first = self.program.path.name, [ids[0] for ids in self.labels.values()]
        if not self.program.takes("allowed_tokens"):
            raise ValueError(
                f"classify: {name} neither returns logits or log probabilities nor takes allowed_tokens; export it "
                'with outputs="logits" or "both", or with logprobs or allowed_tokens in the head'
            )
        if len(set(first)) < len(first):
            raise ValueError(
                f"labels: got {list(self.labels)}, expected different first tokens; to compare all tokens, "
                f'export {name} with outputs="logits" or "both", or with logprobs in the head'
            )

    def check(self, prompt: Sequence[int]) -> None:
        """Raise ValueError if the context has no room for the prompt and a label."""
        room = self.program.max_context_len - max(map(len, self.labels.values())) + 1
        if not 0 < len(prompt) <= room:
            raise ValueError(f"prompt: got {len(prompt)} tokens, expected 1 to {room}")

    def classify(self, prompt: Sequence[int]) -> Classification:
        if not self._can_score:
            label_of = {ids[0]: label for label, ids in self.labels.items()}
            label = label_of.get(_draw_only(self.program, prompt, list(label_of)).id)
            return Classification(label, error=None if label is not None else _impossible_labels())
        logprobs = {label: score(self.program, prompt, ids).logprob for label, ids in self.labels.items()}
        highest = max(logprobs.values())
        if highest == -math.inf:
            return Classification(error=_impossible_labels())
        weights = {label: math.exp(logprob - highest) for label, logprob in logprobs.items()}
        total = sum(weights.values())
        probabilities = {label: weight / total for label, weight in weights.items()}
        return Classification(max(probabilities, key=probabilities.__getitem__), probabilities)


def _impossible_labels() -> ValueError:
    return ValueError("labels: each has a probability of 0 after this prompt")


def _draw_only(program: LLMProgram, prompt: Sequence[int], tokens: Sequence[int], top: int | None = None) -> Token:
    """Return the most likely of `tokens` after `prompt`, or another token if all of them have a probability of 0.

    With `top`, the token comes with its log probability and with the `top` most likely of all tokens. Raises
    RuntimeError if the program is closed meanwhile.
    """
    mask = allow_only(program.vocab_size, tokens)
    options = Options(max_new_tokens=1, ignore_eos=True, logprobs=top)
    for token in Generation(program, prompt, SamplingParameters(allowed_tokens=lambda answer: mask), options):
        return token
    raise RuntimeError(f"{program.path.name} is closed")


def allow_only(vocab_size: int, tokens: Iterable[int]):
    """Return the mask that allows only `tokens`: a numpy array of int32, `[ceil(vocab_size / 32)]`."""
    import numpy

    mask = numpy.zeros(mask_word_count(vocab_size), dtype=numpy.uint32)
    for token in tokens:
        mask[token // TOKENS_PER_MASK_WORD] |= numpy.uint32(1 << token % TOKENS_PER_MASK_WORD)
    return mask.view(numpy.int32)
