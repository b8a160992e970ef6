"""The answers to a request while they are generated: one choice or several, as deltas."""

from __future__ import annotations

import asyncio
import codecs
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from ..llm import BusyError, Generation, Metrics, Token
from .delta import Call, Delta, Offsets, TokenLogprob, Total, token_logprob
from .echo import Echo
from .errors import ApiError, server_error
from .formats.base import REASONING, Parser
from .formats.reader import CALL, CALL_END, CONTENT, Part
from .model import ServedModel
from .prompt_scores import RETRY_SECONDS, PromptScores

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"  # OpenAI's names of finish reasons
END = object()  # in a queue: a choice has no further deltas


class MarkedText:
    """The text of an answer, with the names of marker tokens, such as `<tool_call>`, in their places.

    The engine leaves special tokens out of the text, but the parsers of tool calls need their names. The engine also
    holds text back while it may be the beginning of a stop string. A marker token can therefore arrive before the text
    that precedes it. The place of its name is the number of characters in the bytes of all tokens before it.
    """

    def __init__(self, model: ServedModel):
        self._model, self._decoder = model, codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # the characters of the tokens so far
        self._taken = 0  # the characters of the text that has arrived
        self._names: deque[tuple[int, str]] = deque()  # names whose place has not been reached, with their places

    def take(self, token: Token) -> str:
        """Return the text of a token, and the names whose places it reaches."""
        self._length += len(self._decoder.decode(self._model.llm.token_bytes(token.id)))
        if name := self._model.marker_tokens.get(token.id):
            self._names.append((self._length, name))
        pieces, text = [], token.text
        while self._names and self._names[0][0] <= self._taken + len(text):
            position, name = self._names.popleft()
            count = max(position - self._taken, 0)
            pieces += [text[:count], name]
            self._taken, text = self._taken + count, text[count:]
        self._taken += len(text)
        return "".join(pieces) + text


class NoTokens:
    """Stands for the `Generation` of an answer that has no tokens, because the request wants only its prompt."""

    finish = LENGTH

    def __init__(self, prompt: Sequence[int]):
        self.tokens: list[int] = []
        self.metrics = Metrics(prompt_tokens=len(prompt))

    async def __aiter__(self) -> AsyncIterator[Token]:
        return
        yield

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


class Choice:
    """One answer to a prompt, which OpenAI's API calls a choice.

    - `start`: starts the generation of the tokens. Raises BusyError if the queue is full.
    - `parser`: finds reasoning and tool calls in the text. None: all text is content.
    - `wants_logprobs`: the deltas have the log probabilities of the tokens.
    - `one_call`: end the answer after its first tool call.
    - `echo`: the prompt, which is repeated before the answer, or None.
    - `prompt_scores`: the log probabilities of the prompt, which the echo or the response needs, or None.

    Attributes: `generation`, the tokens as they are generated, or None before the start; `total`, the sum of the deltas
    so far; `completion_tokens`, their number of tokens, also if the engine has generated more; `reasoning_tokens`, the
    number of those of reasoning; `first_token_at`, the time of the first token by `time.monotonic`, or None.
    """

    def __init__(
        self,
        index: int,
        model: ServedModel,
        start: Callable[[], Generation | NoTokens],
        parser: Parser | None = None,
        *,
        wants_logprobs: bool = False,
        one_call: bool = False,
        echo: Echo | None = None,
        prompt_scores: PromptScores | None = None,
    ):
        self.prompt_scores = prompt_scores
        self.index, self.total, self.wants_logprobs = index, Total(), wants_logprobs
        self.completion_tokens, self.reasoning_tokens = 0, 0
        self.first_token_at: float | None = None
        self.generation: Generation | NoTokens | None = None
        self._start, self._is_cancelled = start, False
        self._model, self._parser, self._echo, self._one_call = model, parser, echo, one_call
        self._offsets = Offsets(0 if echo is None else len(echo.text))
        self._call: Call | None = None  # the last one that began
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text has not come, or is held back

    def start(self) -> None:
        """Start the generation. Raises ApiError, and BusyError if the queue is full."""
        self.generation = self._start()

    async def start_when_free(self) -> None:
        """Start the generation as soon as the queue has room, unless the choice is cancelled."""
        while self.generation is None and not self._is_cancelled:
            try:
                self.start()
            except BusyError:
                await asyncio.sleep(RETRY_SECONDS)

    def cancel(self) -> None:
        """End the choice, as at the shutdown of the server: `deltas` raises ApiError."""
        self._end()
        if self.generation is not None:
            self.generation.cancel()

    def close(self) -> None:
        """End the choice. Its deltas are no longer read."""
        self._end()
        if self.generation is not None:
            self.generation.close()

    def _end(self) -> None:
        self._is_cancelled = True
        if self.prompt_scores is not None:
            self.prompt_scores.cancel()

    @property
    def metrics(self) -> Metrics:
        return Metrics() if self.generation is None else self.generation.metrics

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the deltas of the answer. Raises ApiError or an error of the engine if the answer fails."""
        if self.prompt_scores is not None:
            await self.prompt_scores.values()
        if self._echo is not None:
            yield self._note(await self._echo.delta())
        async with aclosing(self._all_deltas()) as deltas:
            async for delta in deltas:
                # A second call can begin without a CALL_END of the first, whose text then had another form.
                is_second = delta.kind == CALL and bool(self.total.calls)
                if not (self._one_call and is_second):
                    yield self._note(delta)
                if self._one_call and (is_second or delta.kind == CALL_END):
                    self.generation.close()
                    yield self._note(Delta(finish=TOOL_CALLS))
                    return
        yield self._note(Delta(finish=self._finish_reason()))

    async def _all_deltas(self) -> AsyncIterator[Delta]:
        """Yield the deltas of all tokens."""
        text = MarkedText(self._model)
        if self.generation is None:
            raise server_error("the server is shutting down", 503)
        async for token in self.generation:
            self.first_token_at = self.first_token_at or time.monotonic()
            self.completion_tokens += 1
            if self.wants_logprobs and token.logprob is not None and not self._is_stop_id(token):
                self._logprobs.append(self._logprob(token))
            if self._parser is None:
                parts, has_come = [(CONTENT, token.text)], bool(token.text)
            else:
                self.reasoning_tokens += self._parser.kind == REASONING
                piece = text.take(token)
                parts = self._parser.feed(piece)
                has_come = bool(piece) and not self._parser.holds_text
            for delta in self._deltas(parts, has_come):
                yield delta
        self._check_complete()
        if self._parser is not None:
            is_content = self._parser.kind == CONTENT
            for delta in self._deltas(self._parser.end(), has_come=not is_content):
                yield delta
        if self._logprobs:  # of tokens without text, such as those of a stop string
            yield Delta(logprobs=self._logprobs)

    def _deltas(self, parts: Sequence[Part], has_come: bool) -> list[Delta]:
        """Return the deltas of parts. Adjacent parts of the same kind make one delta.

        The first delta of content has the log probabilities of the tokens whose text has come since the last one. If
        there is none, the tokens belong to reasoning, calls or tags. `has_come`: the text of all tokens has come.
        """
        deltas: list[Delta] = []
        for kind, text in parts:
            if kind == CALL:
                index = 0 if self._call is None else self._call.index + 1
                self._call = Call(index, self._model.format.call_id(text, index), text)
            if deltas and deltas[-1].kind == kind:
                deltas[-1].text += text
            elif text or kind == CALL_END:
                deltas.append(Delta(kind, text, self._call))
        if content := next((delta for delta in deltas if delta.kind == CONTENT), None):
            content.logprobs = self._logprobs
        if deltas or has_come:
            self._logprobs = []
        return deltas

    def _note(self, delta: Delta) -> Delta:
        """Add a delta to the total, and return it."""
        self.total.add(delta)
        return delta

    def _is_stop_id(self, token: Token) -> bool:
        """Whether a token ended the answer and is not part of it."""
        return token.finish == STOP and self.generation.tokens[-1:] != [token.id]

    def _logprob(self, token: Token) -> TokenLogprob:
        offset = self._offsets.take(self._model.llm.token_bytes(token.id))
        return token_logprob(self._model, token.id, token.logprob, token.top_logprobs, offset)

    def _finish_reason(self) -> str:
        if self.generation.finish == STOP:
            return TOOL_CALLS if self.total.calls else STOP
        return LENGTH  # the answer is as long as the request allows, or the KV cache is full

    def _check_complete(self) -> None:
        """Raise ApiError if the answer was cancelled by the shutdown of the server, or ended because of an error."""
        if self.generation.finish == "cancelled":
            raise server_error("the server is shutting down", 503)
        if self.generation.finish in (None, "error"):
            raise server_error("the model failed")


class Answer:
    """The choices of a request.

    - `choices`: those of the first prompt, then those of the second, and so on: equally many for each prompt.
    - `prompt_count`: the number of prompts.

    Attributes: `id`; `created`, the Unix time at which this object was made; `started`, the time of the request by
    `time.monotonic`; `deadline`, the time by `time.monotonic` at which the answer has to end, or None.
    """

    def __init__(self, model: ServedModel, choices: Sequence[Choice], prompt_count: int = 1):
        self.model, self.choices, self.prompt_count = model, list(choices), prompt_count
        self.id, self.created, self.started = uuid.uuid4().hex, int(time.time()), time.monotonic()
        self.deadline: float | None = None

    def start(self) -> None:
        """Start the choices, as many as find a place in the queue. `deltas` starts the others later.

        Raises BusyError if all find it full, and ApiError if one fails.
        """
        try:
            for choice in self.choices:
                choice.start()
        except BusyError:
            if self.choices[0].generation is None:
                raise
        except BaseException:
            self.close()
            raise

    def cancel(self) -> None:
        """Stop all choices, as at the shutdown of the server: `deltas` raises ApiError."""
        for choice in self.choices:
            choice.cancel()

    def close(self) -> None:
        """Stop the choices that still run. Their deltas are no longer read."""
        for choice in self.choices:
            choice.close()

    async def deltas(self, pause_seconds: float | None = None) -> AsyncIterator[tuple[Choice, Delta] | None]:
        """Start the choices that wait, and yield the deltas of all choices as they come.

        Yields None whenever no delta came for `pause_seconds`. Raises the first error, and ApiError at the deadline.
        """
        queue: asyncio.Queue = asyncio.Queue(maxsize=2 * len(self.choices))
        starting = asyncio.Lock()  # choices that wait for a place in the queue start in their order

        async def run(choice: Choice) -> None:
            try:
                async with starting:
                    await choice.start_when_free()
                async with aclosing(choice.deltas()) as deltas:
                    async for delta in deltas:
                        await queue.put((choice, delta))
            except Exception as error:  # noqa: BLE001  (raised again by the reader of the queue)
                await queue.put(error)
            else:
                await queue.put(END)

        tasks = [asyncio.create_task(run(choice)) for choice in self.choices]
        try:
            running = len(tasks)
            while running:
                entry = await self._next(queue, pause_seconds)
                if isinstance(entry, Exception):
                    raise entry
                if entry is END:
                    running -= 1
                else:
                    yield entry
        finally:
            for task in tasks:
                task.cancel()

    async def _next(self, queue: asyncio.Queue, pause_seconds: float | None) -> Any:
        """Return the next entry of `queue`, or None after `pause_seconds`. Raises ApiError at the deadline."""
        rest = None if self.deadline is None else max(self.deadline - time.monotonic(), 0)
        is_last = rest is not None and (pause_seconds is None or rest <= pause_seconds)
        try:
            return await asyncio.wait_for(queue.get(), rest if is_last else pause_seconds)
        except TimeoutError:
            if not is_last:
                return None
            raise ApiError("the answer took too long", status=504, kind="server_error", code="timeout") from None

    async def wait(self) -> None:
        """Wait for all choices."""
        async with aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass

    # Numbers of tokens -------------------------------------------------------------------

    @property
    def _first_choices(self) -> Sequence[Choice]:
        """The first choice for each prompt."""
        return self.choices[:: max(1, len(self.choices) // self.prompt_count)]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts. Several choices share a prompt, whose tokens count once."""
        return sum(choice.metrics.prompt_tokens for choice in self._first_choices)

    @property
    def cached_tokens(self) -> int:
        """The number of tokens of the prompts that the KV cache already held."""
        return sum(choice.metrics.cached_tokens for choice in self._first_choices)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)
