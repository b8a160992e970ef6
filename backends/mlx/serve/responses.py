"""The objects of `/v1/responses`: whole responses, and the events of a stream."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from .answer import LENGTH, Answer, Choice
from .chat_prompt import all_ids, chat_prompt
from .chat_request import ChatRequest, text_input
from .delta import Call, Delta
from .errors import ApiError, renamed_fields
from .formats.base import REASONING
from .formats.reader import ARGUMENTS, CALL, CALL_END, CONTENT
from .model import ServedModel
from .response import logprob_object
from .responses_request import Reasoning, ResponsesRequest
from .start import start_chat
from .stored import StoredResponse, StoredResponses
from .streaming import ServerSentEvents
from .truncation import without_oldest_turns

# The fields of a request that its response repeats.
REPEATED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "top_logprobs",
    "truncation",
    "user",
)
# The fields of a chat request -> the fields of `/v1/responses` from which they come, for error messages.
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}


def complete(stored: StoredResponses, model: ServedModel, body: ResponsesRequest) -> ChatRequest:
    """Return the chat request with the same answer, and give `body` the stored items to which it refers.

    Raises ApiError, which names the field of a chat.
    """
    body.check_fields()
    body.input = body.with_stored_items(stored).input
    chat = body.as_chat_request()
    chat.check_fields()
    return without_oldest_turns(model, chat) if body.truncation == "auto" else chat


def start_response(stored: StoredResponses, model: ServedModel, body: ResponsesRequest) -> Answer:
    """Start the answer to a request. Raises ApiError, which names the field of this API."""
    with renamed_fields(partial(_field, body)):
        return start_chat(model, complete(stored, model, body))


def input_tokens(stored: StoredResponses, model: ServedModel, body: ResponsesRequest) -> dict[str, Any]:
    """Return the response of `/v1/responses/input_tokens`: the length of the prompt. Raises ApiError, as above."""
    with renamed_fields(partial(_field, body)):
        count = len(all_ids(model, chat_prompt(model, complete(stored, model, body))))
    return {"object": "response.input_tokens", "input_tokens": count}


def input_items(response: StoredResponse) -> dict[str, Any]:
    """Return the response of `/v1/responses/{id}/input_items`, the latest item first."""
    data = [{"id": f"item_{place}"} | item for place, item in enumerate(response.items)][::-1]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return {"object": "list", "data": data, "has_more": False, **ends}


def _field(body: ResponsesRequest, param: str) -> str:
    """Return the path to a field in this API, for its path in a chat request, such as `tools.0.function.parameters`."""
    name, *rest = param.split(".")
    if name == "tools" and rest:
        function = body.functions[int(rest[0])]
        rest = rest[2:] if not function.is_custom else [part for part in rest[2:] if part != "grammar"]
        return ".".join([function.path, *rest])
    dropped = "json_schema" if name == "response_format" else None
    return ".".join([FIELDS.get(name, name), *(part for part in rest if part != dropped)])


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


class Item:
    """An item of the output of a response: reasoning, a message or a call. `text` grows with each delta.

    `name` has the fields of a call that name its function: `name`, and `namespace` if it has one.
    """

    def __init__(self, kind: str, index: int, call: Call | None = None, name: dict[str, str] | None = None):
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}[kind]
        self.kind, self.index, self.id = kind, index, f"{prefix}_{uuid.uuid4().hex}"
        self.call, self.name, self.text, self.logprobs, self.status = call, name, "", [], "in_progress"

    @property
    def is_custom(self) -> bool:
        return self.kind == "custom_tool_call"

    def part(self) -> dict[str, Any]:
        """Return the only part of the item's content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def object(self) -> dict[str, Any]:
        common = {"id": self.id, "type": self.kind, "status": self.status}
        if self.call is not None and self.is_custom:
            return common | self.name | {"call_id": self.call.id, "input": text_input(self.text) if self.text else ""}
        if self.call is not None:
            return common | self.name | {"call_id": self.call.id, "arguments": self.text}
        content = [self.part()] if self.status != "in_progress" else []
        if self.kind == "reasoning":
            return common | {"summary": [], "content": content}
        return common | {"role": "assistant", "content": content}


class ResponsesFormat(ServerSentEvents):
    """Builds the response of an answer, and the events of its stream. Each event is a dict with a type and a number."""

    def __init__(self, answer: Answer, body: ResponsesRequest, stored: StoredResponses):
        self._answer, self._items = answer, []
        self._stored, self._input = stored, None if body.store is False else body.stored_items
        self._names = {function.chat_name: function.name for function in body.functions}
        self._custom = {function.chat_name for function in body.functions if function.is_custom}
        self._number = 0  # of the next event
        self._open: Item | None = None  # the item that grows
        repeated = body.model_dump(include={*REPEATED}, by_alias=True)
        self._common = {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "model": answer.model.name,
            **repeated,
            "metadata": body.metadata or {},
            "text": {"format": {"type": "text"}} | _given(repeated["text"] or {}),
            "tool_choice": repeated["tool_choice"] or "auto",
            "tools": repeated["tools"] or [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "store": body.store is not False,
            "background": False,
            "reasoning": (body.reasoning or Reasoning()).model_dump(),
            "service_tier": "default",
            "previous_response_id": body.previous_response_id,
            "error": None,
        }

    def response(self) -> dict[str, Any]:
        """Return the response with the whole answer."""
        (choice,) = self._answer.choices
        for delta in choice.total.parts:
            self._take(delta, [])
        status = self._status(choice)
        self._close([], status)
        return self._whole(status)

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the events before the answer."""
        state = self._object("in_progress")
        return [self._event(f"response.{name}", response=state) for name in ("created", "in_progress")]

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Return the events for a delta."""
        events: list[dict[str, Any]] = []
        self._take(delta, events)
        if delta.finish:
            status = self._status(choice)
            self._close(events, status)
            events.append(self._event(f"response.{status}", response=self._whole(status)))
        return events

    def error_chunks(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the events for an error that ends the answer."""
        failed = self._object("failed") | {"error": {"code": "server_error", "message": error.detail}}
        return [self._event("response.failed", response=failed)]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return no events: the last event of an answer has the numbers of tokens."""
        return []

    def _whole(self, status: str) -> dict[str, Any]:
        """Return the whole response, and store it unless the client does not want it."""
        response = self._object(status)
        if self._input is not None:
            self._stored.add(response, self._input)
        return response

    def _status(self, choice: Choice) -> str:
        return "incomplete" if choice.total.finish == LENGTH else "completed"

    def _object(self, status: str) -> dict[str, Any]:
        is_over = status in ("completed", "incomplete")
        return self._common | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.object() for item in self._items] if is_over else [],
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._answer.prompt_tokens, self._answer.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._answer.reasoning_tokens},
            "total_tokens": prompt + completion,
        }

    # Items ----------------------------------------------------------------------------------

    def _take(self, delta: Delta, events: list[dict[str, Any]]) -> None:
        """Add a delta to the items, and its events to `events`."""
        if delta.kind == REASONING:
            item = self._item(events, "reasoning")
            item.text += delta.text
            events.append(self._part_event("response.reasoning_text.delta", item, delta=delta.text))
        elif delta.kind == CONTENT and (delta.text or delta.logprobs and self._is_open("message")):
            item = self._item(events, "message")
            logprobs = [logprob_object(entry) for entry in delta.logprobs]
            item.text += delta.text
            item.logprobs += logprobs
            events.append(self._part_event("response.output_text.delta", item, delta=delta.text, logprobs=logprobs))
        elif delta.kind == CALL:
            self._close(events)
            kind = "custom_tool_call" if delta.call.name in self._custom else "function_call"
            self._begin(events, kind, delta.call)
        elif delta.kind == ARGUMENTS:
            self._open.text += delta.text
            if not self._open.is_custom:  # their text comes when it is complete
                events.append(self._item_event("response.function_call_arguments.delta", self._open, delta=delta.text))
        elif delta.kind == CALL_END:
            self._close(events)

    def _item(self, events: list[dict[str, Any]], kind: str) -> Item:
        """Return the open item if it is of this kind. Otherwise end the open item and begin one of this kind."""
        if self._is_open(kind):
            return self._open
        self._close(events)
        return self._begin(events, kind)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open.kind == kind

    def _begin(self, events: list[dict[str, Any]], kind: str, call: Call | None = None) -> Item:
        self._open = item = Item(kind, len(self._items), call, self._names[call.name] if call else None)
        self._items.append(item)
        events.append(self._event("response.output_item.added", output_index=item.index, item=item.object()))
        if call is None:
            events.append(self._part_event("response.content_part.added", item, part=item.part()))
        return item

    def _close(self, events: list[dict[str, Any]], status: str = "completed") -> None:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status if item.call is None or item.call.is_complete else "incomplete"
        if item.kind == "reasoning":
            events.append(self._part_event("response.reasoning_text.done", item, text=item.text))
        elif item.kind == "message":
            events.append(self._part_event("response.output_text.done", item, text=item.text, logprobs=item.logprobs))
        if item.call is None:
            events.append(self._part_event("response.content_part.done", item, part=item.part()))
        elif item.is_custom:
            text = item.object()["input"]
            events.append(self._item_event("response.custom_tool_call_input.delta", item, delta=text))
            events.append(self._item_event("response.custom_tool_call_input.done", item, input=text))
        else:
            done = {"name": item.name["name"], "arguments": item.text}
            events.append(self._item_event("response.function_call_arguments.done", item, **done))
        events.append(self._event("response.output_item.done", output_index=item.index, item=item.object()))

    def _item_event(self, kind: str, item: Item, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=item.id, output_index=item.index, **fields)

    def _part_event(self, kind: str, item: Item, **fields: Any) -> dict[str, Any]:
        return self._item_event(kind, item, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}
