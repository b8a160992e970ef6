"""`LLMProgram`: the `.pte` of a language model, loaded, and its engine."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

from . import binding
from .adapter_files import LayerWeights
from .sampling_parameters import PARAMETERS, check_integer, python_number
from .tokens import TokenTable


@dataclass(frozen=True)
class EngineStats:
    """What the engine does now, and what it did since it was created.

    - `running`: the number of requests that have a row of the KV cache.
    - `waiting`: the number of requests in the queue.
    - `rows`: the number of rows.
    - `requests`, `failed`: the number of requests that ended, and of those that ended by an error.
    - `prompt_tokens`, `reused_tokens`: the tokens of all prompts, and how many of them were in the KV cache already.
    - `generated_tokens`: the drawn tokens.
    - `steps`: the calls of the program that drew tokens. A call can draw tokens of several requests.
    - `drafted_tokens`, `accepted_tokens`: the number of draft tokens, and how many of them were accepted.
    - `busy_seconds`: the time in the model.
    """

    running: int
    waiting: int
    rows: int
    requests: int
    failed: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    steps: int
    drafted_tokens: int
    accepted_tokens: int
    busy_seconds: float


class LLMProgram:
    """A program made by `export_llm`. docs/llm-program.md describes the file.

    - `profile`: whether to time every instruction for `write_profile`. This makes calls slower.
    - `device`: `cpu`, `gpu`, or None for the default.
    - `draft`: a program with the same tokenizer that guesses tokens for speculation.
    - `low_priority`: whether the engine and the CPU yield to other threads.

    Attributes: `path`; `chunk`, the largest number of tokens in one call; `max_context_len`, the capacity of the KV
    cache in positions; `rows`, the number of requests that run at once; `vocab_size`; `eos_ids`; `has_head`,
    `has_logits` and `has_verify`: whether the program has a sampling head, returns logits, and has a method `verify`;
    `logprobs`, the number of most likely tokens that the head returns, or 0 if it returns no log probabilities;
    `token_table`, the bytes of the tokens, or None if they are unknown.

    All methods may be called from any thread. After `close`, they raise RuntimeError.

    Raises FileNotFoundError if a file does not exist, ValueError if it is not a language model or `draft` does not fit
    `path`, RuntimeError if ExecuTorch rejects the file or another library registered an MLXBackend first, and
    OutOfMemoryError, which is a RuntimeError, if the program does not fit into memory.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        profile: bool = False,
        device: str | None = None,
        draft: str | Path | None = None,
        low_priority: bool = False,
    ):
        self.path = Path(path)
        for file in (path, draft):
            if file is not None and Path(file).is_dir():
                raise ValueError(f"{file}: got a folder, expected a program, which `executorch-mlx export` makes of it")
            if file is not None and not Path(file).is_file():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        options = binding.LoadOptions(
            device=None if device is None else device.encode(),
            profile=profile,
            draft=None if draft is None else os.fsencode(draft),
            low_priority=low_priority,
        )
        self.handles = _Handles(path, options)
        # The finalizer also runs at the exit of the process, before Python becomes unable to run the callbacks of the
        # engine's thread.
        self._finalizer = weakref.finalize(self, _finalize, self.handles)
        self.chunk: int = self.get("get_max_seq_len", 1)
        self.max_context_len: int = self.get("get_max_context_len", self.chunk)
        self.rows: int = self.get("get_max_batch_size", 1)
        self.vocab_size: int = self.get("get_vocab_size", 0)
        self.logprobs: int = self.get("sampling_logprobs", 0)
        self.has_head, self.has_logits, self.has_verify = (
            bool(self.get(name, 0)) for name in ("has_head", "has_logits", "has_verify")
        )
        eos = memoryview(self.data("get_eos_ids") or b"").cast("q")
        self.eos_ids: frozenset[int] = frozenset(eos)
        data, offsets = self.data("token_bytes"), self.data("token_offsets")
        self.token_table = None if offsets is None else TokenTable(data, memoryview(offsets).cast("q"))

    def start(self, **options: Any) -> None:
        """Create the engine. `options` are the fields of `executorch_mlx_engine_options`.

        Raises SettingError for an option of the wrong type or out of range.
        """
        options = {name: python_number(value) for name, value in options.items()}
        for name in ("queue_limit", "chunk"):
            check_integer(name, options.get(name, 0), 0, 2**63, "0 to 2**63 - 1")
        settings = binding.EngineOptions(**options)
        self.call("engine_create", ctypes.byref(settings), ctypes.byref(self.handles.engine))

    def close(self) -> None:
        """Cancel all requests and free the memory. Closing again has no effect."""
        self._finalizer()

    def check_process(self) -> None:
        """Raise RuntimeError if the process was forked after the program was loaded: it lacks the engine's thread."""
        if os.getpid() != self.handles.process:
            raise RuntimeError(
                f"{self.path.name}: this process was forked after the model was loaded, so it lacks the thread of the "
                "engine; load the model in the child process, and start that with multiprocessing's method spawn"
            )

    def check_not_in_callback(self) -> None:
        """Raise RuntimeError in a callback of this engine, which goes on when the callback returns."""
        if getattr(_this_thread, "handles", None) is self.handles:
            raise RuntimeError(f"{self.path.name}: a callback must not wait for an answer of the engine that calls it")

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the C API for this engine or model. Its name begins with `engine_` or `model_`.

        Raises the error that the function returns, RuntimeError if the program is closed, and the error of
        `check_process`.
        """
        binding.check(self._status(function, *arguments))

    def _status(self, function: str, *arguments: Any) -> int:
        self.check_process()
        with self.handles as handles:
            if handles.is_closed:
                raise RuntimeError(f"{self.path.name} is closed")
            is_of_engine = function.startswith("engine_") and function != "engine_create"
            handle = handles.engine if is_of_engine else handles.model
            return getattr(handles.library, function)(handle, *arguments)

    # Metadata ---------------------------------------------------------------------------

    def get(self, name: str, default: int | None = None) -> int | None:
        """Return the value of an integer of the metadata, or `default` if the program lacks it."""
        value = ctypes.c_int64()
        status = self._status("model_get_int", name.encode(), ctypes.byref(value))
        if status == binding.NOT_FOUND:
            return default
        binding.check(status)
        return value.value

    def data(self, name: str) -> bytes | None:
        """Return an array of the metadata, or None if the program lacks it."""
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        status = self._status("model_get_data", name.encode(), ctypes.byref(data), ctypes.byref(size))
        if status == binding.NOT_FOUND:
            return None
        binding.check(status)
        return ctypes.string_at(data, size.value)

    def takes(self, name: str) -> bool:
        """Whether the head takes the sampling parameter `name`."""
        metadata = PARAMETERS[name].metadata
        return self.has_head and (metadata is None or bool(self.get(metadata, 0)))

    def set_token_bytes(self, table: Sequence[bytes]) -> None:
        """Give the bytes of each token to a program that lacks them. Must precede `start`."""
        data, offsets = b"".join(table), [0, *accumulate(map(len, table))]
        self.call("model_set_token_bytes", data, binding.ids(offsets), len(table))
        self.token_table = TokenTable(data, offsets)

    # The engine -------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        stats = binding.EngineStats()
        self.call("engine_get_stats", ctypes.byref(stats))
        return EngineStats(**{name: getattr(stats, name) for name in EngineStats.__dataclass_fields__})

    def save_prefix(self, prompt: Sequence[int], path: str | Path, adapter: str | None = None) -> None:
        name = None if adapter is None else adapter.encode()
        self.call("engine_save_adapter_prefix", name, binding.ids(prompt), len(prompt), os.fsencode(path))

    def load_prefix(self, path: str | Path) -> int:
        length = ctypes.c_int64()
        self.call("engine_load_prefix", os.fsencode(path), ctypes.byref(length))
        return length.value

    def prefill(self, prompt: Sequence[int]) -> None:
        self.call("engine_prefill", binding.ids(prompt), len(prompt))

    def clone(self, prompt: Sequence[int]) -> None:
        self.call("engine_clone", binding.ids(prompt), len(prompt))

    def logits(self, prompt: Sequence[int]) -> list[float]:
        values = (ctypes.c_float * self.vocab_size)()
        self.call("engine_logits", binding.ids(prompt), len(prompt), values, len(values))
        return list(values)

    def suspend(self) -> None:
        self.call("engine_suspend")

    def resume(self) -> None:
        self.call("engine_resume")

    def release_memory(self) -> None:
        self.call("engine_release_memory")

    # Adapters ---------------------------------------------------------------------------

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters, sorted."""
        names, size = ctypes.create_string_buffer(0), ctypes.c_size_t(1)
        while size.value > len(names):  # others may load adapters meanwhile
            names = ctypes.create_string_buffer(size.value)
            self.call("engine_list_adapters", names, len(names), ctypes.byref(size))
        return [name.decode() for name in names.raw[: size.value].split(b"\0")[:-1]]

    def load_adapter(self, name: str, layers: Mapping[str, LayerWeights]) -> None:
        weights = (binding.AdapterWeights * len(layers))()
        for entry, (path, layer) in zip(weights, layers.items()):
            entry.layer, entry.rank = path.encode(), layer.a.shape[0]
            entry.inputs, entry.outputs = layer.a.shape[1], layer.b.shape[0]
            entry.a, entry.b = (_floats(matrix) for matrix in (layer.a, layer.b))
        self.call("engine_load_adapter", name.encode(), weights, len(layers))

    def unload_adapter(self, name: str) -> None:
        self.call("engine_unload_adapter", name.encode())

    def write_profile(self, path: str | Path) -> None:
        """Write the times of all calls since the last profile as an ETDump for ExecuTorch's Inspector.

        Raises OSError if `path` cannot be written, and ValueError if the program was loaded without `profile`.
        """
        open(path, "ab").close()  # raises OSError with the reason
        self.call("model_write_profile", os.fsencode(path))


def _floats(matrix: Any) -> Any:
    return matrix.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


# Callbacks -----------------------------------------------------------------------------

_this_thread = threading.local()


def enter_callback(handles: _Handles) -> None:
    """Prepare this thread for Python code. It is that of the engine of `handles`, and runs nothing but callbacks."""
    if not hasattr(_this_thread, "handles"):
        # Otherwise, Python creates and deletes its state of the thread in each callback. The memory that it maps and
        # unmaps for the state takes about a twentieth of the time of a decode step.
        ctypes.pythonapi.PyGILState_Ensure()
        _this_thread.handles = handles


# The C objects -------------------------------------------------------------------------


class _Handles:
    """The model and the engine of a program in C.

    As a context manager, it keeps them from being freed. Inside, `is_closed` tells whether they may be used.
    """

    def __init__(self, path: str | Path, options: binding.LoadOptions):
        self.library = binding.library()
        self.model, self.engine = ctypes.c_void_p(), ctypes.c_void_p()
        self.process = os.getpid()
        self.is_closed = False
        self._users = 0
        self._changed = threading.Condition()  # notified when `_users` becomes 0
        binding.check(self.library.model_load(os.fsencode(path), ctypes.byref(options), ctypes.byref(self.model)))

    def __enter__(self) -> _Handles:
        with self._changed:
            self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._users -= 1
            if self._users == 0:
                self._changed.notify_all()

    def close(self) -> None:
        """End all requests, wait until nothing uses the objects, and free them. Ctrl-C has its effect afterwards."""
        if os.getpid() == self.process:  # a fork lacks the threads to wait for
            with _later_interrupts():
                self._close()

    def _close(self) -> None:
        with self._changed:
            self.is_closed = True
        # The garbage collector may run this on the thread of an engine, which cannot wait for its own end. If it does
        # so before enter_callback(), while ctypes makes the arguments of a callback, engine_close() returns an error.
        # Otherwise, engine_close() ends the calls that wait for a request.
        is_engine_thread = hasattr(_this_thread, "handles")
        if is_engine_thread or self.library.engine_close(self.engine) == binding.INVALID_ARGUMENT:
            threading.Thread(target=self.close).start()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._users == 0)
        self.library.engine_free(self.engine)
        self.library.model_free(self.model)


def _finalize(handles: _Handles) -> None:
    """Close `handles` when their program is freed.

    Python ignores exceptions that a finalizer raises, also KeyboardInterrupt, which is therefore raised again later.
    """
    try:
        handles.close()
    except KeyboardInterrupt:
        try:
            threading.Timer(0.01, _interrupt_main_thread).start()
        except RuntimeError:  # the interpreter ends, and starts no threads
            raise KeyboardInterrupt from None


def _interrupt_main_thread() -> None:
    """Send SIGINT, as Ctrl-C does. It also ends a wait of the main thread, which `_thread.interrupt_main` does not."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@contextmanager
def _later_interrupts() -> Iterator[None]:
    """A context manager: handles a SIGINT that arrives within the context at its end."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # Python runs its handlers on the main thread
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arguments: arrived.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])
