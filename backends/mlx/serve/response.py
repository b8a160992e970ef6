"""The responses of the OpenAI API: whole answers, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from ..llm import Generation


def finish_reason(generation: Generation) -> str:
    """Return OpenAI's name of the finish reason: `stop`, or `length`, which also stands for a full context."""
    return "stop" if generation.finish == "stop" else "length"


def usage(generation: Generation) -> dict[str, Any]:
    """Return the object `usage` of a response: the numbers of tokens."""
    metrics = generation.metrics
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.generated_tokens,
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": metrics.cached_tokens},
    }


class CompletionFormat:
    """Builds the JSON objects for one completion by the model `model`."""

    id_prefix, response_type, chunk_type = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str):
        self._common = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def response(self, generation: Generation) -> dict[str, Any]:
        """Return the response with the whole answer."""
        choice = self._response_choice(generation.text) | {"finish_reason": finish_reason(generation)}
        return self._object(self.response_type, choice) | {"usage": usage(generation)}

    def first_chunk(self) -> dict[str, Any] | None:
        """Return the chunk that a stream sends before the text, or None if there is none."""
        return None

    def chunk(self, text: str | None, finish: str | None = None) -> dict[str, Any]:
        """Return a chunk of a stream. The last chunk has a finish reason instead of text."""
        return self._object(self.chunk_type, self._chunk_choice(text) | {"finish_reason": finish})

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """Return the chunk that follows the answer if the client asked for the numbers of tokens."""
        chunk = self._object(self.chunk_type, {})
        return chunk | {"choices": [], "usage": usage(generation)}

    def _object(self, kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
        choices = [{"index": 0, "logprobs": None, **choice}]
        return self._common | {"object": kind, "choices": choices}

    def _response_choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _chunk_choice(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}


class ChatFormat(CompletionFormat):
    """Builds the JSON objects for one answer in a chat."""

    id_prefix, response_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunk(self) -> dict[str, Any]:
        return self._object(self.chunk_type, {"delta": _message(""), "finish_reason": None})

    def _response_choice(self, text: str) -> dict[str, Any]:
        return {"message": _message(text) | {"refusal": None}}

    def _chunk_choice(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}


def _message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
