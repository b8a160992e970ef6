"""The requests of `/api/chat` and `/api/generate`, Ollama's API, and the chat requests that have the same answers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from .chat_request import MAX_MEDIA, MAX_TOOLS, ChatRequest, Tool, picture_part
from .errors import field_error
from .parts import RequestPart, Several
from .request import CompletionRequest, ExtendedFields, Stops

NO_LIMIT = -1
HARDWARE = {"num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock"}
Images = Annotated[list[str], Field(max_length=MAX_MEDIA)]  # in base64


class Options(ExtendedFields):
    """Sampling parameters by Ollama's names. `num_ctx` and those about the hardware have no effect."""

    num_predict: int | None = Field(None, lt=2**31)
    stop: Stops | None = None

    def unknown_fields(self) -> Iterator[tuple[str, ...]]:
        return (path for path in super().unknown_fields() if path[0] not in HARDWARE)

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of a chat or completion request."""
        self.check_fields()
        limit = NO_LIMIT if self.num_predict is None or self.num_predict < 0 else self.num_predict
        return self.extensions() | {"max_tokens": limit, "stop": self.stop or None}


class Request(RequestPart):
    """The fields of both requests. The server unloads models by its own rules, so `keep_alive` has no effect."""

    model: str
    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: Any = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def _fields(self) -> dict[str, Any]:
        fields = (self.options or Options()).as_fields() | {"model": self.model}
        if isinstance(self.format, dict):
            fields["json_schema"] = self.format
        elif self.format:
            fields["response_format"] = {"type": "json_object"}
        return fields

    def _chat(self, messages: list[dict[str, Any]], variables: frozenset[str], **fields: Any) -> ChatRequest:
        """Return a chat request. `variables` are those of the model's chat template."""
        if isinstance(self.think, str) and "reasoning_effort" in variables:
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["enable_thinking"] = bool(self.think)
        fields |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return ChatRequest(messages=messages, **self._fields(), **fields)


class FunctionCall(RequestPart):
    name: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = {}


class ToolCall(RequestPart):
    id: str | None = None
    function: FunctionCall


class Message(RequestPart):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Several[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(Request):
    """The request of `/api/chat`."""

    messages: Several[Message] = []
    tools: Several[Tool] | None = Field(None, max_length=MAX_TOOLS)

    @property
    def loads_only(self) -> bool:
        """Whether the request wants no answer, but the model in memory."""
        return not self.messages

    def as_request(self, variables: frozenset[str], has_template: bool) -> ChatRequest:
        tools = [tool.model_dump(exclude_none=True, exclude_unset=True) for tool in self.tools or []]
        return self._chat([*_chat_messages(self.messages)], variables, tools=tools or None)


class OllamaGenerateRequest(Request):
    """The request of `/api/generate`. The prompt is a chat message, unless `raw` is true or there is no template."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = False
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: Images | None = None

    @property
    def loads_only(self) -> bool:
        return not self.prompt

    def as_request(self, variables: frozenset[str], has_template: bool) -> ChatRequest | CompletionRequest:
        for name in ("suffix", "template"):
            if getattr(self, name):
                raise field_error(name, "got a text, expected none", code="unsupported_parameter")
        if self.raw or not has_template:
            if self.images:
                raise field_error("images", "expected a prompt that is a chat message")
            logprobs = (self.top_logprobs or 0) if self.logprobs else None
            return CompletionRequest(prompt=(self.system or "") + self.prompt, logprobs=logprobs, **self._fields())
        messages = [{"role": "user", "content": _content(self.prompt, self.images)}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return self._chat(messages, variables)


class ShowRequest(RequestPart):
    """The request of `/api/show`. `name` is the former name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = False


def _content(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Return the content of a chat message with pictures before the text."""
    if not images:
        return text
    parts = [picture_part(f"data:image/any;base64,{data}") for data in images]
    return [*parts, {"type": "text", "text": text}]


def _chat_messages(messages: list[Message]) -> Iterator[dict[str, Any]]:
    """Yield chat messages. Calls and their results get ids, which Ollama's API need not have, in their order."""
    count = 0
    waiting: deque[tuple[str, str]] = deque()  # the names and ids of calls without a result
    for message in messages:
        given: dict[str, Any] = {"role": message.role, "content": _content(message.content or "", message.images)}
        if message.thinking:
            given["reasoning_content"] = message.thinking
        if message.tool_calls:
            given["tool_calls"] = []
            for call in message.tool_calls:
                count += 1
                id = call.id or f"{count:09d}"  # some templates want 9 digits
                function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
                given["tool_calls"].append({"id": id, "type": "function", "function": function})
                waiting.append((function["name"], id))
        if message.role == "tool":
            same = [entry for entry in waiting if message.tool_name in (None, entry[0])]
            name, id = same[0] if same else (message.tool_name, f"{count + 1:09d}")
            if same:
                waiting.remove(same[0])
            given |= {"tool_call_id": message.tool_call_id or id, "name": name}
        yield given
