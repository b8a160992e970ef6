"""The C API of the engine, `executorch_mlx.h`, through ctypes. A test compares the declarations with the header.

The header says what the functions do. The engine runs callbacks on its own thread, where they need the GIL. They can
get it, because ctypes releases the GIL during every call of the API.
"""

from __future__ import annotations

import ctypes
import re
from array import array
from ctypes import POINTER, c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from types import SimpleNamespace
from typing import Any

from ..loader import load_engine
from ..memory import OutOfMemoryError
from .errors import SettingError

OK, INVALID_ARGUMENT, OUT_OF_MEMORY, INVALID_PROGRAM, FAILED, BUSY, NOT_FOUND, ABORTED = range(
    8
)  # executorch_mlx_status
RUNNING, STOP, LENGTH, CONTEXT, CANCELLED, FINISH_ERROR = range(6)  # executorch_mlx_finish


class BusyError(RuntimeError):
    """Raised for a request if the queue of the engine is full, and for an adapter if no slot is free."""


class _Struct(ctypes.Structure):
    """A struct whose first field is its size. Fields that are not given have the defaults of the C API."""

    _defaults_: dict[str, Any] = {}

    def __init__(self, **values: Any):
        super().__init__(**{"size": ctypes.sizeof(self), **self._defaults_, **values})


OnProgress = ctypes.CFUNCTYPE(c_bool, c_void_p, c_double)


class LoadOptions(_Struct):
    _fields_ = [
        ("size", c_size_t),
        ("device", c_char_p),
        ("profile", c_bool),
        ("draft", c_char_p),
        ("on_progress", OnProgress),
        ("user_data", c_void_p),
        ("low_priority", c_bool),
    ]


class EngineOptions(_Struct):
    _fields_ = [
        ("size", c_size_t),
        ("queue_limit", c_int64),
        ("chunk", c_int64),
        ("chunk_seconds", c_double),
        ("reuse_prompts", c_bool),
        ("overlap", c_int64),
    ]
    _defaults_ = {"reuse_prompts": True, "overlap": -1}


class EngineStats(_Struct):
    _fields_ = [
        ("size", c_size_t),
        ("running", c_int64),
        ("waiting", c_int64),
        ("rows", c_int64),
        ("requests", c_int64),
        ("failed", c_int64),
        ("prompt_tokens", c_int64),
        ("reused_tokens", c_int64),
        ("generated_tokens", c_int64),
        ("steps", c_int64),
        ("drafted_tokens", c_int64),
        ("accepted_tokens", c_int64),
        ("busy_seconds", c_double),
    ]


class Event(_Struct):
    _fields_ = [
        ("size", c_size_t),
        ("token", c_int64),
        ("text", c_void_p),  # not c_char_p, which would end at the first zero byte
        ("text_length", c_size_t),
        ("finish", c_int32),
        ("stop_index", c_int32),
        ("logprob", c_float),
        ("top_count", c_int64),
        ("top_tokens", POINTER(c_int64)),
        ("top_logprobs", POINTER(c_float)),
    ]


OnEvent = ctypes.CFUNCTYPE(c_bool, c_void_p, POINTER(Event))
AllowedTokens = ctypes.CFUNCTYPE(c_bool, c_void_p, POINTER(c_int64), c_size_t, POINTER(c_int32), c_size_t)


MAX_RANK = 8


class Array(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * MAX_RANK),
        ("data", c_void_p),
    ]


class Picture(ctypes.Structure):
    _fields_ = [
        ("inputs", POINTER(Array)),
        ("input_count", c_size_t),
        ("hash", c_uint64),
        ("position", c_size_t),
        ("rows", POINTER(c_int64)),
        ("length", c_size_t),
        ("rope_positions", POINTER(c_int64)),
        ("rope_length", c_int64),
    ]


class RequestOptions(_Struct):
    _fields_ = [
        ("size", c_size_t),
        ("prompt", POINTER(c_int64)),
        ("prompt_length", c_size_t),
        ("temperature", c_float),
        ("top_p", c_float),
        ("top_k", c_int64),
        ("min_p", c_float),
        ("has_seed", c_bool),
        ("seed", c_int64),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("bias_tokens", POINTER(c_int64)),
        ("bias_values", POINTER(c_float)),
        ("bias_count", c_size_t),
        ("allowed_tokens", AllowedTokens),
        ("max_new_tokens", c_int64),
        ("stop_ids", POINTER(c_int64)),
        ("stop_id_count", c_size_t),
        ("ignore_eos", c_bool),
        ("stop", POINTER(c_char_p)),
        ("stop_count", c_size_t),
        ("logprobs", c_int32),
        ("priority", c_int32),
        ("draft", c_int32),
        ("on_event", OnEvent),
        ("user_data", c_void_p),
        ("samples", POINTER(c_float)),
        ("sample_count", c_size_t),
        ("timestamps", c_bool),
        ("allow_suppressed", c_bool),
        ("min_new_tokens", c_int64),
        ("adapter", c_char_p),
        ("pictures", POINTER(Picture)),
        ("picture_count", c_size_t),
    ]
    _defaults_ = {"top_p": 1, "repetition_penalty": 1, "logprobs": -1, "draft": -1}


class ScoreOptions(_Struct):
    _fields_ = [
        ("size", c_size_t),
        ("prompt", POINTER(c_int64)),
        ("prompt_length", c_size_t),
        ("targets", POINTER(c_int64)),
        ("target_count", c_size_t),
        ("top_count", c_size_t),
        ("logprobs", POINTER(c_float)),
        ("is_greedy", POINTER(c_bool)),
        ("top_tokens", POINTER(c_int64)),
        ("top_logprobs", POINTER(c_float)),
        ("adapter", c_char_p),
    ]


class AdapterWeights(ctypes.Structure):
    _fields_ = [
        ("layer", c_char_p),
        ("rank", c_size_t),
        ("inputs", c_size_t),
        ("outputs", c_size_t),
        ("a", POINTER(c_float)),
        ("b", POINTER(c_float)),
    ]


class RequestInfo(_Struct):
    _fields_ = [
        ("size", c_size_t),
        ("finish", c_int32),
        ("status", c_int32),
        ("has_seed", c_bool),
        ("seed", c_int64),
        ("stop_id", c_int64),
        ("prompt_tokens", c_int64),
        ("reused_tokens", c_int64),
        ("generated_tokens", c_int64),
        ("drafted_tokens", c_int64),
        ("accepted_tokens", c_int64),
        ("queue_seconds", c_double),
        ("prompt_seconds", c_double),
        ("generation_seconds", c_double),
        ("calls", c_int64),
    ]


STRUCTS = {
    "array": Array,
    "load_options": LoadOptions,
    "engine_options": EngineOptions,
    "engine_stats": EngineStats,
    "adapter_weights": AdapterWeights,
    "event": Event,
    "picture": Picture,
    "request_options": RequestOptions,
    "score_options": ScoreOptions,
    "request_info": RequestInfo,
}

_HANDLE, _IDS = c_void_p, POINTER(c_int64)
# The name of a function without the prefix "executorch_mlx_" → the type of its result, the types of its arguments.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "last_error": (c_char_p, []),
    "model_load": (c_int32, [c_char_p, POINTER(LoadOptions), POINTER(_HANDLE)]),
    "model_free": (None, [_HANDLE]),
    "model_get_int": (c_int32, [_HANDLE, c_char_p, POINTER(c_int64)]),
    "model_get_data": (c_int32, [_HANDLE, c_char_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "model_set_token_bytes": (c_int32, [_HANDLE, c_void_p, _IDS, c_size_t]),
    "model_write_profile": (c_int32, [_HANDLE, c_char_p]),
    "engine_create": (c_int32, [_HANDLE, POINTER(EngineOptions), POINTER(_HANDLE)]),
    "engine_close": (c_int32, [_HANDLE]),
    "engine_free": (None, [_HANDLE]),
    "engine_get_stats": (c_int32, [_HANDLE, POINTER(EngineStats)]),
    "engine_save_prefix": (c_int32, [_HANDLE, _IDS, c_size_t, c_char_p]),
    "engine_save_adapter_prefix": (c_int32, [_HANDLE, c_char_p, _IDS, c_size_t, c_char_p]),
    "engine_load_prefix": (c_int32, [_HANDLE, c_char_p, _IDS]),
    "engine_prefill": (c_int32, [_HANDLE, _IDS, c_size_t]),
    "engine_clone": (c_int32, [_HANDLE, _IDS, c_size_t]),
    "engine_logits": (c_int32, [_HANDLE, _IDS, c_size_t, POINTER(c_float), c_size_t]),
    "engine_suspend": (c_int32, [_HANDLE]),
    "engine_resume": (c_int32, [_HANDLE]),
    "engine_release_memory": (c_int32, [_HANDLE]),
    "engine_load_adapter": (c_int32, [_HANDLE, c_char_p, POINTER(AdapterWeights), c_size_t]),
    "engine_unload_adapter": (c_int32, [_HANDLE, c_char_p]),
    "engine_list_adapters": (c_int32, [_HANDLE, c_char_p, c_size_t, POINTER(c_size_t)]),
    "engine_score": (c_int32, [_HANDLE, _IDS, c_size_t, _IDS, c_size_t, POINTER(c_float), POINTER(c_bool)]),
    "engine_score_top": (c_int32, [_HANDLE, _IDS, c_size_t, _IDS, c_size_t, c_size_t, _IDS, POINTER(c_float)]),
    "engine_submit": (c_int32, [_HANDLE, POINTER(RequestOptions), POINTER(_HANDLE)]),
    "engine_submit_score": (c_int32, [_HANDLE, POINTER(ScoreOptions), POINTER(_HANDLE)]),
    "request_cancel": (None, [_HANDLE]),
    "request_wait": (c_bool, [_HANDLE, c_double]),
    "request_get_info": (None, [_HANDLE, POINTER(RequestInfo)]),
    "request_error": (c_char_p, [_HANDLE]),
    "request_free": (None, [_HANDLE]),
}


@cache
def library() -> SimpleNamespace:
    """Load the engine, and return an object with the functions of `FUNCTIONS` as attributes."""
    loaded = ctypes.CDLL(load_engine())
    functions = {}
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(loaded, f"executorch_mlx_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return SimpleNamespace(**functions)


def check(status: int) -> None:
    """Raise an exception unless `status`, which the last call on this thread returned, is OK."""
    if status != OK:
        raise error_of(status, library().last_error().decode(errors="replace"))


def error_of(status: int, message: str) -> Exception:
    """Return the exception for a status that is not OK.

    It is a SettingError if the message begins with the name of a setting, as in `top_p: got 2, ...`.
    """
    if status == INVALID_ARGUMENT and (found := re.match(r"(?!prompt\b)(\w+): (.*)", message, re.DOTALL)):
        return SettingError(found[1], problem=found[2])
    classes = {
        INVALID_ARGUMENT: ValueError,
        OUT_OF_MEMORY: OutOfMemoryError,
        INVALID_PROGRAM: ValueError,
        BUSY: BusyError,
        NOT_FOUND: FileNotFoundError,
    }
    return classes.get(status, RuntimeError)(message)


def ids(tokens: Any) -> ctypes.Array:
    """Return token ids as an array of int64. Raises TypeError for other types, and OverflowError beyond 64 bits."""
    values = array("q", tokens)  # ctypes would take an integer modulo 2**64
    return (c_int64 * len(values)).from_buffer(values)
