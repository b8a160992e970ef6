"""Computes the log probabilities of given continuations of a prompt, and classifies prompts by them."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import binding
from .errors import FieldError
from .generation import Generation, Options, Token
from .program import LLMProgram
from .sampling_parameters import TOKENS_PER_MASK_WORD, SamplingParameters, mask_word_count

LOOK_SECONDS = 0.05  # between two looks at whether a request was cancelled


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


class CancelledError(RuntimeError):
    """Raised by a call that its argument `is_cancelled` has ended."""


def score(
    program: LLMProgram,
    prompt: Sequence[int],
    continuation: Sequence[int],
    top: int = 0,
    adapter: str | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Score:
    """Score a continuation of a prompt, both given as token ids. `top` is the number of most likely tokens to return.

    `is_cancelled` is called several times in a second. Once it returns true, the work ends, with a CancelledError. A
    program with log probabilities and the method `verify` scores many tokens in one call. Other programs need a call
    for each token.
    """
    top_logprobs: list[tuple]
    if program.has_verify and program.logprobs and (top <= program.logprobs or not program.has_logits):
        logprobs, is_greedy = ScoreRequest(program, prompt, continuation, adapter=adapter).result(is_cancelled)
        top_logprobs = [()] * len(continuation)
        if top:
            top_logprobs = ScoreRequest(program, prompt, continuation, top, adapter).most_likely(is_cancelled)
    else:
        logprobs, is_greedy, top_logprobs = [], [], []
        for i, token in enumerate(continuation):
            if is_cancelled():
                raise CancelledError("score: it was cancelled")
            drawn = _draw_only(program, [*prompt, *continuation[:i]], [token], max(top, 1), adapter)
            # Another token was drawn if `token` has a probability of 0, or none at all.
            logprobs.append(drawn.logprob if drawn.id == token else -math.inf)
            is_greedy.append(drawn.id == token == drawn.top_logprobs[0][0])
            top_logprobs.append(drawn.top_logprobs[:top])
    return Score(sum(logprobs), all(is_greedy), list(continuation), logprobs, top_logprobs)


class ScoreRequest:
    """A request of the engine that scores `targets` after `prompt`, or finds the `top` most likely tokens.

    The engine writes to the arrays of this object until the request has ended, which its finalizer waits for.
    """

    def __init__(
        self,
        program: LLMProgram,
        prompt: Sequence[int],
        targets: Sequence[int],
        top: int = 0,
        adapter: str | None = None,
    ):
        count = len(targets)
        self._program, self._library, self._top = program, binding.library(), top
        self._logprobs, self._is_greedy = (ctypes.c_float * (count * max(top, 1)))(), (ctypes.c_bool * count)()
        self._top_tokens = (ctypes.c_int64 * (count * top))()
        results = {"top_tokens": self._top_tokens, "top_logprobs": self._logprobs, "top_count": top}
        options = binding.ScoreOptions(
            prompt=binding.ids(prompt),
            prompt_length=len(prompt),
            targets=binding.ids(targets),
            target_count=count,
            adapter=None if adapter is None else adapter.encode(),
            **results if top else {"logprobs": self._logprobs, "is_greedy": self._is_greedy},
        )
        self._pointer = ctypes.c_void_p()
        program.check_not_in_callback()
        program.call("engine_submit_score", ctypes.byref(options), ctypes.byref(self._pointer))
        arrays = (self._logprobs, self._is_greedy, self._top_tokens)
        weakref.finalize(self, _free, self._library, self._pointer, arrays)

    def result(self, is_cancelled: Callable[[], bool]) -> tuple[list[float], list[bool]]:
        """Wait for the end. Return the log probability of each target, and whether it is the most likely token."""
        self._wait(is_cancelled)
        return list(self._logprobs), list(self._is_greedy)

    def most_likely(self, is_cancelled: Callable[[], bool]) -> list[tuple[tuple[int, float], ...]]:
        """Wait for the end. Return the most likely tokens in the place of each target."""
        self._wait(is_cancelled)
        pairs = list(zip(self._top_tokens, self._logprobs))
        return [tuple(pairs[i : i + self._top]) for i in range(0, len(pairs), self._top)]

    def _wait(self, is_cancelled: Callable[[], bool]) -> None:
        has_ended = False
        while not has_ended:
            self._program.check_process()
            if is_cancelled():
                self._library.request_cancel(self._pointer)
                self._library.request_wait(self._pointer, -1)
                raise CancelledError("score: it was cancelled")
            has_ended = self._library.request_wait(self._pointer, LOOK_SECONDS)
        info = binding.RequestInfo()
        self._library.request_get_info(self._pointer, ctypes.byref(info))
        if info.finish == binding.FINISH_ERROR:
            message = self._library.request_error(self._pointer).decode(errors="replace")
            raise binding.error_of(info.status, message)
        if info.finish == binding.CANCELLED:
            raise RuntimeError(f"{self._program.path.name} is closed")


def _free(library: Any, pointer: ctypes.c_void_p, arrays: tuple) -> None:
    library.request_free(pointer)


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
            raise FieldError("prompt", f"{len(prompt)} tokens", f"1 to {room}")

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


def _draw_only(
    program: LLMProgram,
    prompt: Sequence[int],
    tokens: Sequence[int],
    top: int | None = None,
    adapter: str | None = None,
) -> Token:
    """Return the most likely of `tokens` after `prompt`, or another token if all of them have a probability of 0.

    With `top`, the token comes with its log probability and with the `top` most likely of all tokens. Raises
    RuntimeError if the program is closed meanwhile.
    """
    mask = allow_only(program.vocab_size, tokens)
    options = Options(max_new_tokens=1, ignore_eos=True, logprobs=top, adapter=adapter)
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
