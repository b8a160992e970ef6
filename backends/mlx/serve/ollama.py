"""Ollama's API: the lines of an answer, and what it says about models."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from .answer import Answer, Choice
from .chat_request import ChatRequest, parse_arguments
from .delta import Delta
from .errors import ApiError, renamed_fields
from .formats.base import REASONING
from .formats.reader import CALL_END, CONTENT
from .model import ServedModel
from .models import Models
from .ollama_request import OllamaChatRequest, OllamaGenerateRequest, Request
from .response import logprob_object
from .start import start_chat, start_completion
from .streaming import JsonLines

VERSION = "0.12.6"  # of Ollama, whose API this is: clients refuse versions without what they need
LATEST = ":latest"  # the tag of a model without a tag
FIELDS = {"response_format": "format", "json_schema": "format", "max_tokens": "options.num_predict"}
EMPTY_DETAILS = {"parent_model": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}


def own_name(name: str, models: Models) -> str:
    """Return the name of a model on this server, which has no tags."""
    return name.removesuffix(LATEST) if name not in models.names else name


def start_ollama(model: ServedModel, body: OllamaChatRequest | OllamaGenerateRequest) -> Answer:
    """Start the answer to a request. Raises ApiError, which names the field of this API."""
    with renamed_fields(lambda param: FIELDS.get(param, param)):
        if body.loads_only:
            return Answer(model, [])
        request = body.as_request(model.abilities_for(bool(getattr(body, "tools", None))).variables, model.llm.chats)
        return (start_chat if isinstance(request, ChatRequest) else start_completion)(model, request)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaFormat(JsonLines):
    """Builds the lines of a stream, or their sum. `has_message`: the answer is a message of a chat, not a text."""

    def __init__(self, answer: Answer, body: Request, has_message: bool):
        self._answer, self._model, self._has_message = answer, body.model, has_message

    def response(self) -> dict[str, Any]:
        """Return the response with the whole answer."""
        if not self._answer.choices:
            return self._object({}, done=True, done_reason="load")
        (choice,) = self._answer.choices
        total = choice.total
        parts = {"content": total.content, "thinking": total.reasoning}
        calls = [self._call(call) for call in total.calls if call.is_complete]
        return self._object(parts | {"tool_calls": calls}, **self._end(choice), **self._logprobs(total.logprobs))

    def first_chunks(self) -> list[dict[str, Any]]:
        return [] if self._answer.choices else [self.response()]

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Return the lines for a delta. A call comes when it is complete."""
        parts: dict[str, Any] = {}
        if delta.kind == CALL_END:
            parts = {"tool_calls": [self._call(delta.call)]}
        elif delta.kind in (CONTENT, REASONING) and delta.text:
            parts = {"content" if delta.kind == CONTENT else "thinking": delta.text}
        lines = [self._object(parts, done=False, **self._logprobs(delta.logprobs))] if parts or delta.logprobs else []
        if delta.finish:
            lines.append(self._object({}, **self._end(choice)))
        return lines

    def error_chunks(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.ollama_body]

    def last_chunks(self) -> list[dict[str, Any]]:
        return []

    def _object(self, parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
        common = {"model": self._model, "created_at": _now()}
        given = {name: part for name, part in parts.items() if part}
        if self._has_message:
            return common | {"message": {"role": "assistant", "content": "", **given}} | fields
        text = {"response": given.pop("content", "")}
        return common | text | given | fields

    def _logprobs(self, entries: list) -> dict[str, Any]:
        return {"logprobs": [logprob_object(entry) for entry in entries]} if entries else {}

    def _call(self, call: Any) -> dict[str, Any]:
        arguments = parse_arguments(call.arguments)
        function = {"index": call.index, "name": call.name}
        return {"id": call.id, "function": function | {"arguments": arguments if isinstance(arguments, dict) else {}}}

    def _end(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of the last line: why the answer ended, counts of tokens, and times in nanoseconds."""
        metrics = choice.metrics
        times = {"load_duration": metrics.queue_seconds, "prompt_eval_duration": metrics.prompt_seconds}
        times["eval_duration"] = metrics.generation_seconds
        times = {"total_duration": sum(times.values()), **times}
        reason = "length" if choice.total.finish == "length" else "stop"
        counts = {"prompt_eval_count": self._answer.prompt_tokens, "eval_count": self._answer.completion_tokens}
        return {
            "done": True,
            "done_reason": reason,
            **{name: int(value * 1e9) for name, value in times.items()},
            **counts,
        }


chat_format = partial(OllamaFormat, has_message=True)
generate_format = partial(OllamaFormat, has_message=False)


def tag(description: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the object of a model in `/api/tags`. `description`: that of `/v1/models`."""
    names = dict.fromkeys(("name", "model"), description["id"])
    details = {"format": "pte", **EMPTY_DETAILS}
    return names | {"modified_at": description["created_at"], "size": size, "digest": "", "details": details}


def show(model: ServedModel) -> dict[str, Any]:
    """Return the response of `/api/show`."""
    tokenizer, template = model.llm.tokenizer, model.abilities_for(has_tools=True)
    capabilities = ["completion"]
    capabilities += ["tools"] if model.llm.chats else []
    capabilities += ["thinking"] if model.format.reasoning or "enable_thinking" in template.variables else []
    info = {"general.architecture": "pte", "pte.context_length": model.llm.program.max_context_len}
    return {
        "modelfile": "",
        "parameters": "",
        "template": (tokenizer.chat_template if tokenizer is not None else None) or "",
        "details": {"format": "pte", **EMPTY_DETAILS},
        "model_info": info,
        "capabilities": capabilities,
    }
