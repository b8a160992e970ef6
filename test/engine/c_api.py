"""Python classes for the objects of the C API. They call the C API through the declarations of `llm/binding.py`.

An error of the C API raises ApiError with the status and the message.
"""

import ctypes as c
import functools
from collections.abc import Callable, Sequence

from executorch_mlx.llm.binding import (  # noqa: F401  (tests use the names that are not used here)
    ABORTED,
    BUSY,
    CANCELLED,
    CONTEXT,
    FAILED,
    FINISH_ERROR,
    INVALID_ARGUMENT,
    INVALID_PROGRAM,
    LENGTH,
    NOT_FOUND,
    OK,
    OUT_OF_MEMORY,
    RUNNING,
    STOP,
    AllowedTokens,
    EngineOptions,
    LoadOptions,
    OnEvent,
    OnProgress,
    RequestInfo,
    RequestOptions,
    library,
)
from executorch_mlx.llm.binding import EngineStats as Stats


class ApiError(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def call(name: str, *arguments) -> None:
    """Call a function that returns a status. Raises ApiError."""
    status = getattr(library(), name)(*arguments)
    if status != OK:
        raise ApiError(status, library().last_error().decode())


def array(type_, values: Sequence):
    return (type_ * len(values))(*values)


class Model:
    def __init__(self, path: object, **options):
        self.handle = c.c_void_p()
        call("model_load", str(path).encode(), c.byref(LoadOptions(**options)), c.byref(self.handle))

    def get_int(self, name: str) -> int:
        value = c.c_int64()
        call("model_get_int", self.handle, name.encode(), c.byref(value))
        return value.value

    def get_data(self, name: str) -> bytes:
        data, size = c.c_void_p(), c.c_size_t()
        call("model_get_data", self.handle, name.encode(), c.byref(data), c.byref(size))
        return c.string_at(data, size.value)

    def free(self) -> None:
        library().model_free(self.handle)


class Engine:
    """A context manager. The argument is a Model, or the path of a model that the engine loads and frees."""

    def __init__(self, model: object, **options):
        self.loaded_model = None if isinstance(model, Model) else Model(model)
        self.handle = c.c_void_p()
        model = self.loaded_model or model
        call("engine_create", model.handle, c.byref(EngineOptions(**options)), c.byref(self.handle))

    def submit(self, prompt: Sequence[int], on_event: Callable | None = None, **options) -> "Request":
        return Request(self, prompt, on_event, options)

    def generate(self, prompt: Sequence[int], **options) -> list[int]:
        """Return the tokens of the answer."""
        with self.submit(prompt, **options) as request:
            request.wait()
            return request.tokens

    def stats(self) -> Stats:
        stats = Stats()
        call("engine_get_stats", self.handle, c.byref(stats))
        return stats

    def save_prefix(self, prompt: Sequence[int], path: object) -> None:
        call("engine_save_prefix", self.handle, array(c.c_int64, prompt), c.c_size_t(len(prompt)), str(path).encode())

    def load_prefix(self, path: object) -> int:
        length = c.c_int64()
        call("engine_load_prefix", self.handle, str(path).encode(), c.byref(length))
        return length.value

    def prefill(self, prompt: Sequence[int]) -> None:
        call("engine_prefill", self.handle, array(c.c_int64, prompt), c.c_size_t(len(prompt)))

    def clone(self, ids: Sequence[int]) -> None:
        call("engine_clone", self.handle, array(c.c_int64, ids), c.c_size_t(len(ids)))

    def logits(self, prompt: Sequence[int], count: int) -> list[float]:
        logits = (c.c_float * count)()
        call("engine_logits", self.handle, array(c.c_int64, prompt), c.c_size_t(len(prompt)), logits, c.c_size_t(count))
        return list(logits)

    def suspend(self) -> None:
        call("engine_suspend", self.handle)

    def resume(self) -> None:
        call("engine_resume", self.handle)

    def release_memory(self) -> None:
        call("engine_release_memory", self.handle)

    def score(self, prompt: Sequence[int], targets: Sequence[int]) -> tuple[list[float], list[bool]]:
        logprobs, greedy = (c.c_float * len(targets))(), (c.c_bool * len(targets))()
        call(
            "engine_score",
            self.handle,
            array(c.c_int64, prompt),
            c.c_size_t(len(prompt)),
            array(c.c_int64, targets),
            c.c_size_t(len(targets)),
            logprobs,
            greedy,
        )
        return list(logprobs), list(greedy)

    def score_top(self, prompt: Sequence[int], targets: Sequence[int], top: int) -> list[dict[int, float]]:
        tokens, logprobs = (c.c_int64 * (len(targets) * top))(), (c.c_float * (len(targets) * top))()
        call(
            "engine_score_top",
            self.handle,
            array(c.c_int64, prompt),
            c.c_size_t(len(prompt)),
            array(c.c_int64, targets),
            c.c_size_t(len(targets)),
            c.c_size_t(top),
            tokens,
            logprobs,
        )
        return [dict(zip(tokens[i : i + top], logprobs[i : i + top])) for i in range(0, len(tokens), top)]

    def free(self) -> None:
        library().engine_free(self.handle)
        if self.loaded_model:
            self.loaded_model.free()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()


class Request:
    """A request that collects its events.

    For each event, `events` holds (token, text, finish, stop_index), and `logprobs` holds the log probability of the
    token and a dict with those of the most likely tokens.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], on_event: Callable | None, options: dict):
        self.events, self.logprobs, self.on_event = [], [], on_event
        values = RequestOptions()
        values.prompt, values.prompt_length = array(c.c_int64, prompt), len(prompt)
        bias = options.pop("logit_bias", {})
        values.bias_tokens, values.bias_values = array(c.c_int64, list(bias)), array(c.c_float, list(bias.values()))
        values.bias_count = len(bias)
        ids = options.pop("stop_ids", ())
        values.stop_ids, values.stop_id_count = array(c.c_int64, ids), len(ids)
        stop = [text.encode() for text in options.pop("stop", ())]
        values.stop, values.stop_count = array(c.c_char_p, stop), len(stop)
        if (seed := options.pop("seed", None)) is not None:
            values.has_seed, values.seed = True, seed
        allowed = options.pop("allowed_tokens", None)
        self._allowed = AllowedTokens(functools.partial(_fill_mask, allowed)) if allowed else AllowedTokens()
        values.allowed_tokens = self._allowed
        self._on_event = OnEvent(self._take)
        values.on_event = self._on_event
        for name, value in options.items():
            setattr(values, name, value)
        self.handle = c.c_void_p()
        call("engine_submit", engine.handle, c.byref(values), c.byref(self.handle))

    def _take(self, _, pointer) -> bool:
        event = pointer.contents
        text = c.string_at(event.text, event.text_length) if event.text_length else b""
        self.events.append((event.token, text, event.finish, event.stop_index))
        top = {event.top_tokens[i]: event.top_logprobs[i] for i in range(event.top_count)}
        self.logprobs.append((event.logprob, top))
        return self.on_event is None or self.on_event(self) is not False

    @property
    def tokens(self) -> list[int]:
        """The tokens of the answer, without a stop id."""
        return [token for token, _, finish, stop in self.events if token >= 0 and not (finish == STOP and stop < 0)]

    @property
    def text(self) -> bytes:
        return b"".join(text for _, text, _, _ in self.events)

    @property
    def finish(self) -> int:
        return self.events[-1][2]

    def wait(self, seconds: float = 120) -> bool:
        return library().request_wait(self.handle, seconds)

    def cancel(self) -> None:
        library().request_cancel(self.handle)

    @property
    def info(self) -> RequestInfo:
        info = RequestInfo()
        library().request_get_info(self.handle, c.byref(info))
        return info

    @property
    def error(self) -> str:
        return library().request_error(self.handle).decode()

    def free(self) -> None:
        library().request_free(self.handle)
        self.handle = c.c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()


def _fill_mask(allowed: Callable, _, answer, length, mask, words) -> bool:
    """Write a mask of the ids that `allowed(answer)` returns.

    If `allowed` returns None, returns False, which ends the request.
    """
    ids = allowed([answer[i] for i in range(length)])
    if ids is None:
        return False
    bits = [0] * words
    for token in ids:
        bits[token // 32] |= 1 << (token % 32)
    for i, word in enumerate(bits):
        mask[i] = word - (1 << 32) if word >= 1 << 31 else word
    return True
