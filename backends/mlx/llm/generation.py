"""`Generation`: an answer that the engine generates, token by token."""

from __future__ import annotations

import ctypes
import itertools
import re
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from . import binding
from .errors import SettingError
from .metrics import Metrics
from .program import LLMProgram, enter_callback
from .sampling_parameters import PENALTIES, SamplingParameters, check_integer, mask_word_count, python_number, shown

if TYPE_CHECKING:
    from .vision.processor import Encoding

# The reasons for which an answer ends, in the order of executorch_mlx_finish.
FINISH_REASONS = (None, "stop", "length", "context", "cancelled", "error")
CANCELLED, ERROR = "cancelled", "error"
NOT_IN_STOPS = re.compile("[\0\ud800-\udfff]")  # C strings have no zeros, and UTF-8 has no lone surrogates


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    - `text`: the text that the token completes. The text has only whole characters. Text that may be
      the beginning of a stop string is held back until a later token.
    - `finish`: None, except for the last token. There it is `stop` if the token is a stop id, which is
      not part of the answer, or completes a stop string; `length` after `max_new_tokens` tokens; or
      `context` if the KV cache is full.
    - `logprob`: the log probability of the token, or None without `logprobs`.
    - `top_logprobs`: the most likely tokens and their log probabilities, in descending order.
    """

    id: int
    text: str
    finish: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Result:
    """A complete answer.

    - `text`: the text of the answer, without the stop string.
    - `tokens`: the token ids of the answer, without the stop id.
    - `finish`: one of `stop`, `length`, `context` and `cancelled`, or None if there is no answer.
    - `seed`: the seed of the first draw, or None if the program takes no seed.
    - `logprobs`: the log probability of each of `tokens`, or None without `logprobs`.
    - `error`: the reason why there is no answer, or None if there is one.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    seed: int | None = None
    logprobs: list[float] | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Options:
    """The options of a request besides the sampling parameters. `stop_ids` includes those of the tokenizer.

    `pictures` are those of the prompt, of a vision-language model.
    `samples` (float32, contiguous), `timestamps` and `allow_suppressed` are for speech models.

    Raises SettingError for a value of the wrong type or out of range.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    priority: int = 0
    draft: int = -1
    samples: Any = None
    timestamps: bool = False
    allow_suppressed: bool = False
    adapter: str | None = None
    pictures: Sequence[Encoding] = ()

    def __post_init__(self):
        check_adapter_name(self.adapter)
        lowest_values = {"max_new_tokens": 1, "min_new_tokens": 0, "logprobs": 0, "priority": -(2**31), "draft": -1}
        for name, lowest in lowest_values.items():
            value = python_number(getattr(self, name))
            object.__setattr__(self, name, value)
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_integer and lowest <= value < 2**31):
                bound = "below 2**31" if is_integer and value > lowest else f"of at least {lowest}"
                raise SettingError(name, shown(value), f"an integer {bound}")
        if not all(isinstance(stop, str) and stop and not NOT_IN_STOPS.search(stop) for stop in self.stop):
            expected = "non-empty strings without zeros and lone surrogates"
            raise SettingError("stop", repr(list(self.stop)), expected)
        for token in self.stop_ids:
            check_integer("stop_ids", token, 0, 2**63, "a token id")


def check_adapter_name(name: Any) -> None:
    """Raise SettingError unless `name` is None or can be the name of an adapter."""
    if name is not None and not (isinstance(name, str) and name and not NOT_IN_STOPS.search(name)):
        raise SettingError("adapter", shown(name), "a name without zeros and lone surrogates")


class Generation(Iterator[Token], AsyncIterator[Token]):
    """An answer. The engine begins to generate it when this object is created. Iteration yields its tokens.

    `for` and `async for` both work. If several tasks iterate, each token goes to one of them. `cancel()`
    ends the answer, and may be called from any thread. `close()` ends the answer and the iteration at once, without
    waiting for the engine. The end of a `with` block calls `close()`. If nothing refers to this object any more, the
    answer is cancelled. These attributes are available at any time:

    - `prompt`: the token ids of the prompt.
    - `tokens`, `text`: the part of the answer that the iteration has reached.
    - `finish`: None until the iteration ends, then `stop`, `length`, `context`, `cancelled` or `error`.
    - `stop`: the stop string that ended the answer, or None.
    - `metrics`: token counts and times of the engine. The engine may be ahead of the iteration.
    - `seed`: the seed of the first draw, or None if the program takes no seed. The same seed gives the
      same answer.

    Iteration raises the exception that `allowed_tokens` raised, SettingError if `allowed_tokens` returned an invalid
    mask, and RuntimeError if a step failed. If the step did not fit into memory, this RuntimeError is an
    `executorch_mlx.memory.OutOfMemoryError`. Other answers are unaffected.
    """

    def __init__(self, program: LLMProgram, prompt: Sequence[int], parameters: SamplingParameters, options: Options):
        self.prompt = list(prompt)
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.stop: str | None = None
        self._texts: list[str] = []
        self._logprobs: list[float] = []
        self._is_cancelled = False
        self._program = program  # the engine must live as long as this object
        self._request = Request(program, self.prompt, parameters, options)
        self._has_logprobs = options.logprobs is not None
        # At the exit of the process, daemon threads may still read the request. It ends with the program.
        weakref.finalize(self, self._request.handle.release).atexit = False
        info = self._request.info()
        self.seed: int | None = info.seed if info.has_seed else None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def metrics(self) -> Metrics:
        info = self._request.info()
        common = set(Metrics.__dataclass_fields__) - {"cached_tokens"}
        return Metrics(cached_tokens=info.reused_tokens, **{name: getattr(info, name) for name in common})

    def __next__(self) -> Token:
        while self.finish is None:
            self._program.check_process()
            if self._request.events.empty():
                self._program.check_not_in_callback()
            token = self._take(self._request.events.get())
            if token is not None:
                return token
        raise StopIteration

    async def __anext__(self) -> Token:
        while self.finish is None:
            self._program.check_process()
            try:
                event = self._request.events.get_nowait()
            except Empty:
                await self._request.wait_for_event()
                continue
            token = self._take(event)
            if token is not None:
                return token
        raise StopAsyncIteration

    def _take(self, event: Event) -> Token | None:
        """Add an event to the answer. Return the event's token, or None if it has none or the answer is cancelled."""
        if event.finish is not None:
            self._request.events.put(event)  # another thread may wait for it: its iteration ends, too
        if self.finish is not None:
            return None
        if self._is_cancelled:
            self.finish = event.finish and CANCELLED
            return None
        self.finish, self.stop = event.finish, event.stop
        if event.finish == ERROR:
            raise self._request.error()
        self._texts.append(event.text)
        if event.token < 0:
            return None
        if not event.is_stop_id:
            self.tokens.append(event.token)
            self._logprobs.append(event.logprob)
        return Token(event.token, event.text, event.finish, event.logprob, event.top_logprobs)

    def cancel(self) -> None:
        """End the answer before the next token. May be called from any thread."""
        self._is_cancelled = True
        self._request.handle.cancel()

    def close(self) -> None:
        """End the answer at once: `finish` becomes `cancelled` unless the answer has ended already."""
        self.cancel()
        if self.finish is None:
            self.finish = CANCELLED

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def result(self) -> Result:
        """Wait for the rest of the answer, and return the whole answer."""
        for _ in self:
            pass
        logprobs = self._logprobs if self._has_logprobs else None
        return Result(self.text, self.tokens, self.finish, self.metrics, self.seed, logprobs)


# The request of the engine -------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """A copy of an `executorch_mlx_event`. If `is_stop_id` is true, the token ends the answer and is not part of it.

    `stop`: the stop string that ends the answer, or None.
    """

    token: int
    text: str
    finish: str | None
    is_stop_id: bool
    stop: str | None
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]


_requests: dict[int, Request] = {}  # those that have not ended, by the key that the engine passes to the callbacks
_keys = itertools.count(1)


class RequestHandle:
    """The pointer to a request of the engine. Two parties share it: the engine, until the last event, and a
    `Generation`.

    The finalizer of the `Generation` keeps this object. It must not keep the `Request`, whose exception may refer to
    the `Generation`: Python would then never collect the two.
    """

    def __init__(self):
        self.pointer = ctypes.c_void_p()
        self._library = binding.library()
        self._is_last = [True, False]  # what leave() pops: False in its first call, True in its second

    def cancel(self) -> None:
        self._library.request_cancel(self.pointer)

    def release(self) -> None:
        """Cancel the request, or free it if the engine has sent the last event."""
        if len(self._is_last) == 2:  # the engine has not left
            self.cancel()
        self.leave()

    def leave(self) -> None:
        """Record that one of the two parties no longer needs the request. The second call frees it."""
        if self._is_last.pop():  # atomic: the two calls may be on two threads
            self._library.request_free(self.pointer)


class Request:
    """A request of the engine.

    `handle` is its pointer, and `events` receives its events. The constructor raises SettingError for an argument that
    the program does not support, and BusyError if the queue is full.
    """

    def __init__(self, program: LLMProgram, prompt: Sequence[int], parameters: SamplingParameters, options: Options):
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.handle, self._library = RequestHandle(), binding.library()
        self._allowed_tokens, self._words = parameters.allowed_tokens, mask_word_count(program.vocab_size)
        self._wants_logprobs, self._stops = options.logprobs is not None, options.stop
        self._wakers: deque[Callable[[], object]] = deque()  # of the tasks that wait for an event
        self.handles = program.handles
        self._exception: BaseException | None = None  # what `allowed_tokens` raised
        key = next(_keys)
        settings = _request_options(prompt, parameters, options)
        settings.user_data = key
        _requests[key] = self
        try:
            program.call("engine_submit", ctypes.byref(settings), ctypes.byref(self.handle.pointer))
        except BaseException:
            del _requests[key]
            raise

    def info(self) -> binding.RequestInfo:
        info = binding.RequestInfo()
        self._library.request_get_info(self.handle.pointer, ctypes.byref(info))
        return info

    def error(self) -> BaseException:
        """Return the exception of a request that ended with an error."""
        status = self.info().status
        if self._exception is not None and status == binding.INVALID_ARGUMENT:
            return self._exception
        # Otherwise `allowed_tokens` failed for a draft token only, which does not end the request.
        return binding.error_of(status, self._library.request_error(self.handle.pointer).decode(errors="replace"))

    async def wait_for_event(self) -> None:
        """Wait until `events` may have another event."""
        import asyncio

        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def wake() -> None:
            loop.call_soon_threadsafe(lambda: None if arrived.done() else arrived.set_result(None))

        self._wakers.append(wake)
        try:
            if self.events.empty():  # else the event may have come before `wake` was there
                await arrived
        finally:
            with suppress(ValueError):
                self._wakers.remove(wake)

    # Called on the thread of the engine.

    def receive(self, event: binding.Event, is_last: bool) -> None:
        if is_last:
            self._allowed_tokens = None  # it may hold the many states of a grammar
        self.events.put(self._copy(event))
        while self._wakers:
            with suppress(RuntimeError, IndexError):  # the event loop was closed, or the last task has ended
                self._wakers.popleft()()

    def _copy(self, event: binding.Event) -> Event:
        count, has_token = event.top_count, event.token >= 0
        return Event(
            event.token,
            ctypes.string_at(event.text, event.text_length).decode() if event.text_length else "",
            FINISH_REASONS[event.finish],
            event.finish == binding.STOP and event.stop_index < 0,
            self._stops[event.stop_index] if event.stop_index >= 0 else None,
            event.logprob if self._wants_logprobs and has_token else None,
            tuple(zip(event.top_tokens[:count], event.top_logprobs[:count])) if count else (),
        )

    def allow(self, answer: list[int], target: Any) -> bool:
        """Write the mask for the next draw to `target`, a pointer to int32. Return False if this raises an exception.

        If `allowed_tokens` returns None, `target` stays unchanged: it allows all tokens.
        """
        try:
            mask = self._allowed_tokens(answer)
            if mask is not None:
                _copy_mask(mask, target, self._words)
            return True
        except BaseException as error:  # noqa: BLE001  (raised again where the answer is read)
            self._exception = error
            return False


@binding.OnEvent
def _on_event(key: int, event: Any) -> bool:
    request, is_last = _requests[key], event.contents.finish != binding.RUNNING
    enter_callback(request.handles)
    request.receive(event.contents, is_last)
    if is_last:
        del _requests[key]
        request.handle.leave()
    return True


@binding.AllowedTokens
def _on_allowed_tokens(key: int, answer: Any, length: int, mask: Any, words: int) -> bool:
    request = _requests[key]
    enter_callback(request.handles)
    return request.allow(answer[:length], mask)


def _copy_mask(mask: Any, target: Any, words: int) -> None:
    """Copy a mask, which may be anything that numpy can read. Raises SettingError for a wrong dtype or size."""
    import numpy

    mask = numpy.asarray(mask)
    if mask.dtype != numpy.int32 or mask.size != words:
        raise SettingError("allowed_tokens", f"{mask.dtype} of shape {list(mask.shape)}", f"int32 of shape [{words}]")
    ctypes.memmove(target, numpy.ascontiguousarray(mask).ctypes.data, mask.nbytes)


def _request_options(prompt: Sequence[int], parameters: SamplingParameters, options: Options) -> binding.RequestOptions:
    has_mask = parameters.allowed_tokens is not None
    bias, stop = parameters.logit_bias, [text.encode() for text in options.stop]
    return binding.RequestOptions(
        prompt=binding.ids(prompt),
        prompt_length=len(prompt),
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=parameters.top_k,
        min_p=parameters.min_p,
        has_seed=parameters.seed is not None,
        seed=parameters.seed or 0,
        **{name: getattr(parameters, name) for name in PENALTIES},
        bias_tokens=binding.ids([*bias]),
        bias_values=(ctypes.c_float * len(bias))(*bias.values()),
        bias_count=len(bias),
        allowed_tokens=_on_allowed_tokens if has_mask else binding.AllowedTokens(),
        max_new_tokens=options.max_new_tokens or 0,
        min_new_tokens=options.min_new_tokens or 0,
        stop_ids=binding.ids([*options.stop_ids]),
        stop_id_count=len(options.stop_ids),
        ignore_eos=options.ignore_eos,
        stop=(ctypes.c_char_p * len(stop))(*stop),
        stop_count=len(stop),
        logprobs=-1 if options.logprobs is None else options.logprobs,
        priority=options.priority,
        # `allowed_tokens` may be a function that advances a grammar in each call and cannot undo rejected drafts.
        draft=0 if has_mask and options.draft < 0 else options.draft,
        on_event=_on_event,
        samples=None if options.samples is None else options.samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        sample_count=0 if options.samples is None else len(options.samples),
        timestamps=options.timestamps,
        allow_suppressed=options.allow_suppressed,
        adapter=None if options.adapter is None else options.adapter.encode(),
        pictures=(binding.Picture * len(options.pictures))(*map(_picture, options.pictures)),
        picture_count=len(options.pictures),
    )


_NUMBERS = {"int64": 4, "float32": 6}  # of dtypes, as in executorch_mlx.h


def _picture(encoding: Encoding) -> binding.Picture:
    arrays = (binding.Array * len(encoding.inputs))()
    for array, values in zip(arrays, encoding.inputs):
        array.size, array.dtype, array.rank = ctypes.sizeof(array), _NUMBERS[values.dtype.name], values.ndim
        array.shape[: values.ndim], array.data = values.shape, values.ctypes.data
    positions = encoding.rope_positions
    return binding.Picture(
        arrays,
        len(arrays),
        encoding.hash,
        encoding.position,
        binding.ids(encoding.rows),
        len(encoding.rows),
        None if positions is None else binding.ids(positions.reshape(-1).tolist()),
        encoding.rope_length,
    )
