"""The requests of the OpenAI API, as far as this server supports them.

A request with an unknown field returns HTTP 400. A request with an unsupported field returns HTTP 400 unless
the value of the field has no effect.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from ..llm.sampling_parameters import SCALARS
from .errors import ApiError

# The unsupported fields, and for each the values that have no effect. The value None has no effect in any field.
UNSUPPORTED: dict[str, tuple] = {
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
# Fields that identify the client. They have no effect.
IDENTITIES = {"user", "safety_identifier", "prompt_cache_key"}

# The sampling parameters that have a JSON form: all but allowed_tokens, which is a function.
SamplingFields = create_model(
    "SamplingFields",
    **{name: (spec.type | None, Field(None, ge=spec.low, le=spec.high)) for name, spec in SCALARS.items()},
    logit_bias=(dict[int, float] | None, None),
)


class GenerationRequest(SamplingFields):
    """The fields that chat and completion requests share."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False

    def generate_arguments(self) -> dict[str, Any]:
        """Return the arguments of `LLM.generate`, without the prompt."""
        arguments = {name: getattr(self, name) for name in (*SamplingFields.model_fields, "ignore_eos")}
        arguments["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop or []
        arguments["temperature"] = 1.0 if self.temperature is None else self.temperature  # OpenAI's default
        arguments["max_new_tokens"] = self.max_new_tokens
        return arguments

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum length of the answer in tokens, or None for no limit."""
        raise NotImplementedError

    @property
    def max_tokens_field(self) -> str:
        """The name of the request's field that limits the length of the answer."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check_fields(self) -> None:
        """Raise ApiError for an unsupported or unknown field."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IDENTITIES or _is_one_of(value, UNSUPPORTED.get(name, ())):
                continue
            if name in UNSUPPORTED:
                accepted = " or ".join(map(json.dumps, (*UNSUPPORTED[name], None)))
                message = f"{name} is not supported by this server: expected {accepted}"
                raise ApiError(message, param=name, code="unsupported_parameter")
            raise ApiError(f"{name}: unknown field", param=name, code="unknown_parameter")


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionRequest(GenerationRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = None

    @property
    def max_new_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    @property
    def single_prompt(self) -> str | list[int]:
        """The one prompt, which the request may give in a list. Raises ApiError for several prompts."""
        if self.prompt and isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            if len(self.prompt) > 1:
                raise ApiError(f"prompt: got {len(self.prompt)} prompts, expected 1", param="prompt")
            return self.prompt[0]
        return self.prompt


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        """Join the content if it is a list of text parts. Raises ValueError for parts of other types."""
        if not isinstance(content, list):
            return content
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"got a part of type {kind!r}, expected 'text'")
        return "".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _check_fields(self) -> Message:
        unsupported = [name for name, value in (self.model_extra or {}).items() if value not in (None, [])]
        if unsupported:
            raise ValueError(f"{unsupported[0]} is not supported in a message")
        return self

    def as_dict(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content} | ({"name": self.name} if self.name else {})


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


def _is_one_of(value: Any, accepted: tuple) -> bool:
    # For `==`, 0 and False are equal. They must differ here: `logprobs` is a number in completions and a bool in chats.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted)
