"""The request of `/v1/messages`, Anthropic's API, and the chat request that has the same answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..llm.chat_template import Abilities
from .chat_request import MAX_TOOLS, Cacheable, ChatRequest, ThinkingOptions, picture_part
from .errors import field_error
from .parts import FUNCTION_NAME, Caller, RequestPart, Several
from .request import MAX_STOPS, ExtendedFields, Stop

BETWEEN_BLOCKS = "\n\n"  # blocks are texts of their own

# Messages ------------------------------------------------------------------------------


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


Texts = str | Several[TextBlock]


class ImageSource(RequestPart):
    type: Literal["base64"]
    media_type: str = Field(pattern=r"^image/[a-z]+$")
    data: str


class ImageBlock(Cacheable):
    type: Literal["image"]
    source: ImageSource

    @property
    def part(self) -> dict[str, Any]:
        """The part of a chat message."""
        return picture_part(f"data:{self.source.media_type};base64,{self.source.data}")


class ToolUse(Cacheable):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]
    caller: Caller | None = None


class ToolResult(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: Texts | None = None
    is_error: bool | None = False


class Thinking(RequestPart):
    """Reasoning of an earlier answer. The signature, by which Anthropic recognizes its own, has no effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinking(RequestPart):
    """Reasoning that only Anthropic can read."""

    type: Literal["redacted_thinking"]
    data: str


UserBlock = Annotated[TextBlock | ImageBlock | ToolResult, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUse | Thinking | RedactedThinking, Field(discriminator="type")]


class UserMessage(RequestPart):
    role: Literal["user"]
    content: str | Several[UserBlock]


class AssistantMessage(RequestPart):
    role: Literal["assistant"]
    content: str | Several[AssistantBlock]


class SystemMessage(RequestPart):
    role: Literal["system"]
    content: Texts


InputMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def _blocks(content: str | list | None) -> list:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content or []


def _text(content: Texts | None) -> str:
    return BETWEEN_BLOCKS.join(block.text for block in _blocks(content))


def _parts(blocks: Iterable[TextBlock | ImageBlock]) -> list[dict[str, Any]]:
    """Return the parts of a chat message for texts and pictures."""
    parts: list[dict[str, Any]] = []
    for is_text, group in groupby(blocks, lambda block: block.type == "text"):
        same = list(group)
        parts += [{"type": "text", "text": _text(same)}] if is_text else [block.part for block in same]
    return parts


def _user_messages(blocks: Iterable[TextBlock | ImageBlock | ToolResult]) -> Iterable[dict[str, Any]]:
    """Yield the chat messages for blocks of the user: one for each result, and one for adjacent texts and pictures."""
    for is_result, group in groupby(blocks, lambda block: block.type == "tool_result"):
        if not is_result:
            yield {"role": "user", "content": _parts(group)}
            continue
        for block in group:
            content = ("Error: " if block.is_error else "") + _text(block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _assistant_message(blocks: list) -> dict[str, Any]:
    """Return the chat message for blocks of the assistant. Its texts are those between the calls of one answer."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if block.type == "text"),
    }
    if thinking := "".join(block.thinking for block in blocks if block.type == "thinking"):
        message["reasoning_content"] = thinking
    calls = [block for block in blocks if block.type == "tool_use"]
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input)}} for call in calls
        ]
    return message


# Tools and options ----------------------------------------------------------------------


class Tool(Cacheable):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    # Values without effect: the model sees all tools and calls them itself, and their arguments come as it writes them.
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Several[Literal["direct"]] | None = None

    def as_chat_tool(self) -> dict[str, Any]:
        function = self.model_dump(exclude_none=True, include={"name", "description", "strict"})
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


class ToolChoice(RequestPart):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("expected a name with the type tool, and only there")
        return self

    def as_chat_choice(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class JsonOutput(RequestPart):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputOptions(RequestPart):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class ClearThinking(RequestPart):
    """No effect: the chat template decides which reasoning of earlier turns the model sees."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(RequestPart):
    edits: Several[ClearThinking] | None = None


class CountRequest(ExtendedFields, Cacheable):
    """The request of `/v1/messages/count_tokens`. It may have all fields of a request for an answer."""

    model: str
    messages: Several[InputMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    system: Texts | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = False
    tools: Several[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    thread: dict[str, Any] | None = None
    # Fields without effect, or with values without effect.
    context_management: ContextManagement | None = None
    diagnostics: dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    # Not in Anthropic's API, as most extended fields.
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def as_chat_request(self, template: Abilities) -> ChatRequest:
        """Return the chat request with the same answer. Raises ApiError.

        `template`: the abilities of the model's chat template.
        """
        self.check_fields()
        if self.thread is not None:
            problem = "got a thread, but this server stores no answers; expected all messages"
            raise field_error("thread", problem, code="thread_unsupported_request")  # the package then sends them
        given = self.extensions() | self.model_dump(exclude_none=True, include={"model", "max_tokens", "stream"})
        if self.tools:
            given["tools"] = [tool.as_chat_tool() for tool in self.tools]
        if self.tool_choice is not None:
            given["tool_choice"] = self.tool_choice.as_chat_choice()
            given["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"schema": self.output_config.format.schema_}
            given["response_format"] = {"type": "json_schema", "json_schema": schema}
        messages = self._chat_messages()
        is_begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        given |= {"messages": messages, "continue_final_message": is_begun, "stop": self.stop_sequences}
        return ChatRequest(**given | self._reasoning_fields(template))

    def _reasoning_fields(self, template: Abilities) -> dict[str, Any]:
        """Return the fields for `thinking` and `effort`. What asks for reasoning has no effect on other models."""
        fields: dict[str, Any] = {"chat_template_kwargs": self.chat_template_kwargs}
        if self.thinking is not None and self.thinking.type == "disabled":
            return fields | {"reasoning_effort": "none"}
        if self.thinking is not None:
            fields["thinking"] = True
        if self.output_config is not None and "reasoning_effort" in template.variables:
            fields["reasoning_effort"] = self.output_config.effort
        return fields

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for role, group in groupby(self.messages, lambda message: message.role):  # adjacent ones are one turn
            blocks = [block for message in group for block in _blocks(message.content)]
            if role == "user":
                messages += _user_messages(blocks or _blocks(""))
            elif role == "assistant":
                messages.append(_assistant_message(blocks))
            else:
                messages.append({"role": "system", "content": _text(blocks)})
        return messages


class MessagesRequest(CountRequest):
    """The request of `/v1/messages`."""

    max_tokens: int = Field(ge=1, lt=2**31)
