"""Generates one answer, token by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..sampling_parameters import SamplingParameters, SettingError, mask_word_count
from .context import Context
from .metrics import Metrics
from .program import LLMProgram
from .sampler import sampler_for
from .text import TextStream, TokenTable

# The reasons for which an answer ends. The C++ runner has the same list.
FINISH_REASONS = STOP, LENGTH, CONTEXT, CANCELLED, ERROR = "stop", "length", "context", "cancelled", "error"


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    - `text`: the text that the token completes. The text has only whole characters. Text that may be
      the beginning of a stop string is held back until a later token.
    - `finish`: None, except for the last token. There it is `stop` if the token is a stop id, which is
      not part of the answer, or completes a stop string; `length` after `max_new_tokens` tokens; or
      `context` if the KV cache is full.
    """

    id: int
    text: str
    finish: str | None = None


@dataclass(frozen=True)
class Result:
    """A complete answer.

    - `text`: the text of the answer, without the stop string.
    - `tokens`: the token ids of the answer, without the stop id.
    - `finish`: one of `FINISH_REASONS`, or None if there is no answer.
    - `seed`: the seed of the first draw, or None if the program takes no seed.
    - `error`: the reason why there is no answer, or None if there is one.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    seed: int | None = None
    error: ValueError | None = None


@dataclass(frozen=True)
class StopConditions:
    """The conditions that end an answer. `max_new_tokens` is None for no limit.

    Raises SettingError if `max_new_tokens` is neither None nor an integer of at least 1.
    """

    max_new_tokens: int | None
    stop: Sequence[str]
    stop_ids: Collection[int]

    def __post_init__(self):
        count = self.max_new_tokens
        is_valid = count is None or (isinstance(count, int) and not isinstance(count, bool) and count >= 1)
        if not is_valid:
            raise SettingError("max_new_tokens", f": got {count!r}, expected an integer of at least 1")


class AnswerBuilder:
    """Collects the tokens and the text of one sequence, and detects the end of the answer.

    `finish` is None until the answer ends. Raises SettingError for invalid stop strings.
    """

    def __init__(self, table: TokenTable | None, conditions: StopConditions):
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._texts: list[str] = []
        self._conditions = conditions
        self._stream = TextStream(table, conditions.stop)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, token: int, has_room: bool) -> Token:
        """Add the drawn token id `token` to the answer, and return the `Token` with the text that it completes.

        `has_room` says whether the KV cache has a position left for the token. Sets `finish` if the
        token ends the answer.
        """
        text, found_stop = "", False
        if token in self._conditions.stop_ids:
            self.finish = STOP
        else:
            self.tokens.append(token)
            text, found_stop = self._stream.feed(token)
            if len(self.tokens) == self._conditions.max_new_tokens:
                self.finish = LENGTH
            elif not has_room:
                self.finish = CONTEXT
        if self.finish is not None and not found_stop:
            rest, found_stop = self._stream.finish()
            text += rest
        if found_stop:
            self.finish = STOP
        self._texts.append(text)
        return Token(token, text, self.finish)


class Generation(Iterator[Token]):
    """An answer that is generated while you iterate over its tokens.

    `cancel()` ends the answer before the next step, and may be called from any thread. `close()` ends the
    answer at once, and so does the end of a `with` block. These attributes are available at any time:

    - `prompt`: the token ids of the prompt.
    - `tokens`, `text`: the answer so far.
    - `finish`: None until the answer ends, then one of `FINISH_REASONS`.
    - `metrics`: token counts and times.
    - `seed`: the seed of the first draw, or None if the program takes no seed. The same seed gives the
      same answer.

    The constructor raises PromptLengthError for an empty prompt or one longer than the context,
    ValueError for a token id outside the vocabulary, and SettingError for a setting that is invalid or
    unsupported. Iteration raises SettingError for an invalid mask, and RuntimeError if a step fails:
    `executorch_mlx.memory.OutOfMemoryError` if the step does not fit into memory. The next answer is
    unaffected.
    """

    def __init__(
        self,
        context: Context,
        prompt: Sequence[int],
        parameters: SamplingParameters,
        table: TokenTable | None,
        conditions: StopConditions,
    ):
        check_prompt(context.program, prompt)
        self.prompt = list(prompt)
        self._ids = list(prompt)  # prompt and answer
        self._context, self._parameters = context, parameters
        self._sampler = sampler_for(context.program, parameters)
        self._answer = AnswerBuilder(table, conditions)
        self._cancelled = threading.Event()
        self.seed = self._sampler.seed
        self.metrics = Metrics(prompt_tokens=len(prompt))

    @property
    def tokens(self) -> list[int]:
        return self._answer.tokens

    @property
    def text(self) -> str:
        return self._answer.text

    @property
    def finish(self) -> str | None:
        return self._answer.finish

    def __next__(self) -> Token:
        if self.finish is not None:
            raise StopIteration
        drawn = self._draw()
        if drawn is None:
            self._answer.finish = CANCELLED
            raise StopIteration
        token = self._answer.take(drawn, len(self._ids) < self._context.program.max_context_len)
        self._ids.append(drawn)
        return token

    def _draw(self) -> int | None:
        """Draw the next token and return its id, or None if the answer was cancelled. Sets `finish` after an error."""
        begin = time.perf_counter()
        try:
            allowed = allowed_mask(self._parameters, self._context.program, self.tokens)
            drawn = None if self._cancelled.is_set() else self._context.draw(
                self._ids,
                self._sampler,
                step=self.metrics.generated_tokens,
                allowed=allowed,
                cancelled=self._cancelled.is_set,
            )
        except BaseException:
            self._answer.finish = ERROR
            raise
        if drawn is None:
            return None
        if self.metrics.generated_tokens == 0:
            self.metrics.cached_tokens = drawn.reused
        self.metrics.count_token(time.perf_counter() - begin)
        return drawn.id

    def cancel(self) -> None:
        """End the answer before the next step. May be called from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """End the answer at once: `finish` becomes `cancelled` unless the answer has ended already."""
        self.cancel()
        if self.finish is None:
            self._answer.finish = CANCELLED

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def result(self) -> Result:
        """Generate the rest of the answer, and return the whole answer."""
        for _ in self:
            pass
        return Result(self.text, self.tokens, self.finish, self.metrics, self.seed)


class PromptLengthError(ValueError):
    """Raised for a prompt that is empty, or longer than the context."""


def check_prompt(program: LLMProgram, prompt: Sequence[int]) -> None:
    """Check the token ids of a prompt.

    Raises PromptLengthError if the prompt is empty or longer than the context, and ValueError if an id
    is outside the vocabulary.
    """
    if not 0 < len(prompt) <= program.max_context_len:
        raise PromptLengthError(f"prompt: got {len(prompt)} tokens, expected 1 to {program.max_context_len}")
    outside = [token for token in prompt if not 0 <= token < program.vocab_size]
    if outside:
        raise ValueError(f"prompt: id {outside[0]} is outside the vocabulary [0, {program.vocab_size})")


def allowed_mask(
    parameters: SamplingParameters, program: LLMProgram, answer: Sequence[int]
) -> torch.Tensor | None:
    """Call `parameters.allowed_tokens` with the answer so far, and return the mask for the next draw.

    The mask is int32 `[B, ceil(V / 32)]`, or None if all tokens are allowed. Raises SettingError if the
    function returns anything else than such a mask for one sequence.
    """
    mask = None if parameters.allowed_tokens is None else parameters.allowed_tokens(answer)
    if mask is None:
        return None
    mask, count = torch.as_tensor(mask), mask_word_count(program.vocab_size)
    if mask.dtype != torch.int32 or mask.numel() != count:
        raise SettingError(
            "allowed_tokens", f": got {mask.dtype} of shape {list(mask.shape)}, expected int32 of shape [{count}]"
        )
    return mask.reshape(1, count).expand(program.batch, -1).contiguous()
