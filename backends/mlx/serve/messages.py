"""The objects of `/v1/messages`, Anthropic's API: whole messages, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any

from .answer import LENGTH, TOOL_CALLS, Answer, Choice
from .chat_prompt import all_ids, chat_prompt
from .chat_request import parse_arguments
from .delta import Call, Delta
from .errors import ApiError, renamed_fields
from .formats.base import REASONING
from .formats.reader import ARGUMENTS, CALL, CALL_END, CONTENT
from .messages_request import CountRequest, MessagesRequest
from .model import ServedModel
from .start import start_chat
from .streaming import ServerSentEvents

# The fields of a chat request -> the fields of `/v1/messages` from which they come, for error messages.
FIELDS = {"response_format": "output_config.format", "stop": "stop_sequences", "reasoning_effort": "thinking.type"}


def start_message(model: ServedModel, body: MessagesRequest) -> Answer:
    """Start the answer to a request. Raises ApiError, which names the field of this API."""
    with renamed_fields(_field):
        return start_chat(model, body.as_chat_request(model.abilities_for(bool(body.tools))))


def count_tokens(model: ServedModel, body: CountRequest) -> dict[str, Any]:
    """Return the response of `/v1/messages/count_tokens`: the length of the prompt. Raises ApiError, as above."""
    with renamed_fields(_field):
        chat = body.as_chat_request(model.abilities_for(bool(body.tools)))
        chat.check_fields()
        return {"input_tokens": len(all_ids(model, chat_prompt(model, chat)))}


def _field(param: str) -> str:
    """Return the path to a field in this API, for its path in a chat request, such as `tools.0.function.parameters`."""
    name, *rest = param.split(".")
    if name == "tools":
        rest = ["input_schema" if part == "parameters" else part for part in rest if part != "function"]
    return ".".join([FIELDS.get(name, name), *(part for part in rest if part != "json_schema")])


def _block(kind: str, call: Call | None) -> dict[str, Any]:
    """Return an empty block of the content."""
    if kind == "thinking":
        return {"type": kind, "thinking": "", "signature": ""}
    if kind == "tool_use":
        return {"type": kind, "id": call.id, "name": call.name, "input": {}}
    return {"type": kind, "text": ""}  # without `citations`: the AI SDK refuses null


def _input(call: Call) -> dict[str, Any]:
    """Return the arguments of a call.

    Arguments that are cut off, or have no form in JSON, are text under the name that Anthropic gives it. No client
    takes it for an argument of the function.
    """
    try:
        value = parse_arguments(call.arguments) if call.is_complete else None
        json.dumps(value, allow_nan=False)  # a number such as 1e999 is infinite
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": call.arguments}


class MessagesFormat(ServerSentEvents):
    """Builds the message of an answer, and the events of its stream."""

    def __init__(self, answer: Answer, body: MessagesRequest):
        self._answer, self._shows_thinking = answer, body.shows_thinking
        self._count = 0  # of the blocks that have begun
        self._open: str | None = None  # the type of the block that grows

    def response(self) -> dict[str, Any]:
        """Return the message with the whole answer."""
        (choice,) = self._answer.choices
        content: list[dict[str, Any]] = []
        for part in choice.total.parts:
            if part.kind == CALL:
                content.append(_block("tool_use", part.call) | {"input": _input(part.call)})
            elif part.kind == CONTENT and part.text:
                content.append(_block("text", None) | {"text": part.text})
            elif part.kind == REASONING:
                content.append(_block("thinking", None) | {"thinking": part.text if self._shows_thinking else ""})
        return self._message(content, **self._end(choice), usage=self._usage())

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the event before the answer. It counts all tokens of the prompt, of which some may be in the cache."""
        usage = self._usage() | {"input_tokens": self._answer.prompt_tokens, "cache_read_input_tokens": 0}
        message = self._message([], stop_reason=None, stop_sequence=None, usage=usage | {"output_tokens": 0})
        return [{"type": "message_start", "message": message}]

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Return the events for a delta."""
        events: list[dict[str, Any]] = []
        if delta.kind == REASONING:
            self._begin(events, "thinking")
            if self._shows_thinking:
                self._grow(events, "thinking_delta", thinking=delta.text)
        elif delta.kind == CONTENT and delta.text:
            self._begin(events, "text")
            self._grow(events, "text_delta", text=delta.text)
        elif delta.kind == CALL:
            self._close(events)
            self._begin(events, "tool_use", delta.call)
        elif delta.kind == ARGUMENTS:
            self._grow(events, "input_json_delta", partial_json=delta.text)
        elif delta.kind == CALL_END:
            self._close(events)
        if delta.finish:
            self._close(events)
            events.append({"type": "message_delta", "delta": self._end(choice), "usage": self._usage()})
            events.append({"type": "message_stop"})
        return events

    def error_chunks(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the event for an error that ends the answer."""
        return [error.anthropic_body]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return no events: those of the last delta end the message."""
        return []

    def _message(self, content: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        common = {"id": f"msg_{self._answer.id}", "type": "message", "role": "assistant"}
        return common | {"model": self._answer.model.name, "content": content, **fields}

    def _end(self, choice: Choice) -> dict[str, Any]:
        """Return the fields that say why the answer ended."""
        generation, finish = choice.generation, choice.total.finish
        if finish == LENGTH:
            reason = "model_context_window_exceeded" if generation.finish == "context" else "max_tokens"
        else:
            reason = "tool_use" if finish == TOOL_CALLS else "stop_sequence" if generation.stop else "end_turn"  # type: ignore[union-attr]
        return {"stop_reason": reason, "stop_sequence": generation.stop if reason == "stop_sequence" else None}  # type: ignore[union-attr]

    def _usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. `input_tokens` counts only those of the prompt that were not in the cache."""
        cached = self._answer.cached_tokens
        return {
            "input_tokens": self._answer.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._answer.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._answer.reasoning_tokens},
        }

    # Blocks ---------------------------------------------------------------------------------

    def _begin(self, events: list[dict[str, Any]], kind: str, call: Call | None = None) -> None:
        """Begin a block, and end the open one, unless the open one is of this type."""
        if self._open == kind:
            return
        self._close(events)
        self._open, self._count = kind, self._count + 1
        events.append(self._block_event("content_block_start", content_block=_block(kind, call)))

    def _grow(self, events: list[dict[str, Any]], kind: str, **text: str) -> None:
        events.append(self._block_event("content_block_delta", delta={"type": kind, **text}))

    def _close(self, events: list[dict[str, Any]]) -> None:
        """End the open block, if there is one."""
        if self._open is not None:
            events.append(self._block_event("content_block_stop"))
            self._open = None

    def _block_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": self._count - 1, **fields}
