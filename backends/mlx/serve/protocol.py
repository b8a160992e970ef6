"""OpenAI's API as far as it goes here: what a request may hold, and what comes back.

A field that asks for something that is not there is refused; so is one that nobody knows.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..llm import Generation

# Fields that are not there, with the values that ask for nothing. None asks for nothing anywhere.
NEUTRAL: dict[str, tuple] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
# Who asks: it makes no difference to the answer.
IDENTITIES = {"user", "safety_identifier", "prompt_cache_key"}


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Options(BaseModel):
    """What both kinds of requests may hold."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = None
    ignore_eos: bool = False

    def settings(self) -> dict[str, Any]:
        """The arguments of `LLM.generate`."""
        names = ("seed", "top_p", "presence_penalty", "frequency_penalty", "logit_bias")
        names += ("top_k", "min_p", "repetition_penalty", "ignore_eos")
        given = {name: getattr(self, name) for name in names}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        temperature = 1.0 if self.temperature is None else self.temperature
        return given | {"stop": stop, "temperature": temperature}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionRequest(Options):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = None

    def most(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    @property
    def length_name(self) -> str:
        return "max_tokens"

    def the_prompt(self) -> str | list[int]:
        if self.prompt and isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            if len(self.prompt) > 1:
                raise ApiError(f"prompt holds {len(self.prompt)} prompts, expected one", param="prompt")
            return self.prompt[0]
        return self.prompt


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        """A text may come in parts."""
        if not isinstance(content, list):
            return content
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"a part is {kind!r}, expected text")
        return "".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _only_text(self) -> Message:
        asked = [name for name, value in (self.model_extra or {}).items() if value not in (None, [])]
        if asked:
            raise ValueError(f"{asked[0]} is not supported in a message")
        return self

    def plain(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content} | ({"name": self.name} if self.name else {})


class ChatRequest(Options):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def most(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def length_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


def check_fields(options: Options) -> None:
    """ApiError for a field that asks for what is not there."""
    for name, value in (options.model_extra or {}).items():
        if value is None or name in IDENTITIES or _is_among(value, NEUTRAL.get(name, ())):
            continue
        if name in NEUTRAL:
            neutral = " or ".join(map(repr, (*NEUTRAL[name], None)))
            told = f"{name} is not supported here, expected {neutral}"
            raise ApiError(told, param=name, code="unsupported_parameter")
        raise ApiError(f"{name} is not a parameter here", param=name, code="unknown_parameter")


def _is_among(value: Any, neutral: tuple) -> bool:
    """0 is not False: completions ask for logprobs with a number."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


# What comes back -----------------------------------------------------------------------


def finish_reason(generation: Generation) -> str:
    return "stop" if generation.finish == "stop" else "length"


def usage(generation: Generation) -> dict[str, Any]:
    metrics = generation.metrics
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.generated_tokens,
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": metrics.cached_tokens},
    }


class Shape:
    """The objects that carry one answer of the model `model`."""

    prefix, whole_object, part_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str):
        self._common = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generation: Generation) -> dict[str, Any]:
        choice = self._whole_choice(generation.text) | {"finish_reason": finish_reason(generation)}
        return self._object(self.whole_object, choice) | {"usage": usage(generation)}

    def part(self, text: str | None, finish: str | None = None) -> dict[str, Any]:
        """A piece of a stream; None is nothing but the end."""
        return self._object(self.part_object, self._part_choice(text) | {"finish_reason": finish})

    def opening(self) -> dict[str, Any] | None:
        """What a stream begins with, before there is text."""
        return None

    def totals(self, generation: Generation) -> dict[str, Any]:
        """What a stream ends with, if asked for."""
        part = self._object(self.part_object, {})
        return part | {"choices": [], "usage": usage(generation)}

    def _object(self, kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
        choices = [{"index": 0, "logprobs": None, **choice}]
        return self._common | {"object": kind, "choices": choices}

    def _whole_choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _part_choice(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}


class ChatShape(Shape):
    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> dict[str, Any]:
        return self._object(self.part_object, {"delta": _message(""), "finish_reason": None})

    def _whole_choice(self, text: str) -> dict[str, Any]:
        return {"message": _message(text) | {"refusal": None}}

    def _part_choice(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}


def _message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
