"""One answer, token by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .context import Context
from .metrics import Metrics
from .program import WORD, LLMProgram
from .sampler import sampler_of
from .settings import SettingError, Settings
from .text import TextStream, TokenTable

STOP, LENGTH, CONTEXT, CANCELLED, ERROR = "stop", "length", "context", "cancelled", "error"


@dataclass(frozen=True)
class Token:
    """A token as it comes.

    `text` is what it lets out: whole characters, and nothing that may yet become a stop string.
    `finish` is None except for the last one: `stop` for a stop id, which is no part of the
    answer, or a stop string; `length` for max_new_tokens; `context` if the context is full.
    """

    id: int
    text: str
    finish: str | None = None


@dataclass(frozen=True)
class Result:
    """A whole answer. `tokens` are without a stop id; `error` says why there is none."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    seed: int | None = None
    error: ValueError | None = None


class Answer:
    """What one row of tokens adds up to, and when it ends."""

    def __init__(
        self, table: TokenTable | None, stop: Sequence[str], stop_ids: Collection[int], most: int | None
    ):
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish: str | None = None
        self._stream, self._stop_ids, self._most = TextStream(table, stop), stop_ids, most

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def take(self, token: int, room: bool) -> Token:
        """The token as it goes out; `room` says whether the context can take it in."""
        text = ""
        if token in self._stop_ids:
            self.finish = STOP
        else:
            self.tokens.append(token)
            text, stopped = self._stream.feed(token)
            if stopped:
                self.finish = STOP
                return self._out(token, text)
            if self._most is not None and len(self.tokens) >= self._most:
                self.finish = LENGTH
            elif not room:
                self.finish = CONTEXT
        if self.finish is not None:
            rest, stopped = self._stream.finish()
            text += rest
            self.finish = STOP if stopped else self.finish
        return self._out(token, text)

    def _out(self, token: int, text: str) -> Token:
        self.pieces.append(text)
        return Token(token, text, self.finish)


class Generation(Iterator[Token]):
    """The tokens that follow a prompt, drawn as they are asked for.

    `cancel()` ends it before its next step, from any thread; `close()` at once, and so does the
    end of a `with`. What came so far stays: `text`, `tokens`, `finish` (that of `Token`, or
    `cancelled`, or `error`), `metrics`, and `seed`, with which the same answer comes again.

    Raises ValueError for a prompt that is empty or too long, and SettingError; RuntimeError
    from a step that fails.
    """

    def __init__(
        self,
        context: Context,
        prompt: Sequence[int],
        settings: Settings,
        *,
        table: TokenTable | None,
        max_new_tokens: int | None,
        stop: Sequence[str],
        stop_ids: Collection[int],
    ):
        check_prompt(context.program, prompt)
        self.prompt = list(prompt)
        self._ids = list(prompt)
        self._context, self._settings = context, settings
        self._sampler = sampler_of(context.program, settings)
        self._answer = Answer(table, stop, stop_ids, max_new_tokens)
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
        token = self._answer.take(drawn, len(self._ids) < self._context.program.context_len)
        self._ids.append(drawn)
        return token

    def _draw(self) -> int | None:
        begin = time.perf_counter()
        try:
            allowed = allowed_tokens(self._settings, self._context.program, self.tokens)
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
        seconds = time.perf_counter() - begin
        if self.metrics.generated_tokens == 0:
            self.metrics.cached_tokens = drawn.reused
            self.metrics.prompt_seconds = seconds
        else:
            self.metrics.generation_seconds += seconds
        self.metrics.generated_tokens += 1
        return drawn.id

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self.cancel()
        if self.finish is None:
            self._answer.finish = CANCELLED

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def result(self) -> Result:
        """All that is left of it, waited for."""
        for _ in self:
            pass
        return Result(self.text, self.tokens, self.finish, self.metrics, self.seed)


class PromptLengthError(ValueError):
    """A prompt that is empty, or longer than the context."""


def check_prompt(program: LLMProgram, prompt: Sequence[int]) -> None:
    """ValueError if `prompt` is not what `program` can go on from."""
    if not 0 < len(prompt) <= program.context_len:
        raise PromptLengthError(
            f"the prompt has {len(prompt)} tokens, expected 1 to {program.context_len}"
        )
    outside = [token for token in prompt if not 0 <= token < program.vocab_size]
    if outside:
        raise ValueError(
            f"the prompt has the id {outside[0]}, outside the vocabulary [0, {program.vocab_size})"
        )


def check_length(max_new_tokens: int | None) -> None:
    if max_new_tokens is None:
        return
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise SettingError("max_new_tokens", f" is {max_new_tokens!r}, expected at least 1")


def allowed_tokens(
    settings: Settings, program: LLMProgram, answer: Sequence[int]
) -> torch.Tensor | None:
    """The mask of the next draw, int32 `[B, ceil(V / 32)]`; None allows everything."""
    ask: Callable[[Sequence[int]], Any] | None = settings.allowed_tokens
    mask = None if ask is None else ask(answer)
    if mask is None:
        return None
    mask, words = torch.as_tensor(mask), -(-program.vocab_size // WORD)
    if mask.dtype != torch.int32 or mask.numel() != words:
        raise SettingError(
            "allowed_tokens",
            f" gave {mask.dtype} of shape {list(mask.shape)}, expected int32 of shape [{words}]",
        )
    return mask.reshape(1, words).expand(program.batch, -1).contiguous()
