"""The responses of `/v1/completions` and `/v1/chat/completions`: whole answers, and the chunks of a stream."""

from __future__ import annotations

from typing import Any

from .answer import Answer, Choice, Delta, TokenLogprob
from .errors import ApiError
from .formats import ToolCall


def usage(answer: Answer) -> dict[str, Any]:
    """Return the object `usage` of a response: the numbers of tokens."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


class CompletionFormat:
    """Builds the JSON objects for the answer to a completion request."""

    ends_with_done = True
    id_prefix, response_type, chunk_type = "cmpl", "text_completion", "text_completion"

    def __init__(self, answer: Answer):
        self._answer = answer
        self._offsets = dict.fromkeys(range(len(answer.choices)), 0)  # of the text, by choice
        self._common = {
            "id": f"{self.id_prefix}-{answer.id}",
            "created": answer.created,
            "model": answer.model.name,
            "system_fingerprint": None,
        }

    def response(self) -> dict[str, Any]:
        """Return the response with the whole answer."""
        choices = [self._whole(choice) for choice in self._answer.choices]
        return self._object(self.response_type, choices) | {"usage": usage(self._answer)}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks that a stream sends before the text."""
        return []

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks of a stream for a delta. The last one of a choice has its finish reason."""
        chunks = []
        if delta.content or delta.logprobs:
            text = {"text": delta.content, "logprobs": self._logprobs(choice, delta)}
            chunks.append(self._chunk(choice, text))
        if delta.finish:
            chunks.append(self._chunk(choice, {"text": "", "logprobs": None}, delta.finish))
        return chunks

    def error_chunks(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the chunk for an error that ends the answer."""
        return [error.body]

    def last_chunks(self, include_usage: bool) -> list[dict[str, Any]]:
        """Return the chunk that follows the answer if the client asked for the numbers of tokens."""
        return [self._object(self.chunk_type, []) | {"usage": usage(self._answer)}] if include_usage else []

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._common | {"object": kind, "choices": choices}

    def _chunk(self, choice: Choice, value: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return self._object(self.chunk_type, [{"index": choice.index, **value, "finish_reason": finish}])

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = {"text": choice.total.content, "logprobs": self._logprobs(choice, choice.total)}
        return {"index": choice.index, **text, "finish_reason": choice.total.finish}

    def _logprobs(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        offsets = []
        for entry in delta.logprobs:
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(entry.text)
        return {
            "tokens": [entry.text for entry in delta.logprobs],
            "token_logprobs": [entry.logprob for entry in delta.logprobs],
            "top_logprobs": [{top.text: top.logprob for top in entry.top} for entry in delta.logprobs],
            "text_offset": offsets,
        }


class ChatFormat(CompletionFormat):
    """Builds the JSON objects for the answer to a chat request."""

    id_prefix, response_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, answer: Answer):
        super().__init__(answer)
        self._call_counts = dict.fromkeys(range(len(answer.choices)), 0)

    def first_chunks(self) -> list[dict[str, Any]]:
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return [self._chunk(choice, start) for choice in self._answer.choices]

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        changes: list[dict[str, Any]] = []
        if delta.reasoning:
            changes.append({"reasoning_content": delta.reasoning})
        if delta.content or delta.logprobs and not changes:
            changes.append({"content": delta.content})
        for id, call in delta.calls:
            index = self._call_counts[choice.index]
            self._call_counts[choice.index] += 1
            changes.append({"tool_calls": [{"index": index, **call_object(id, call)}]})
        chunks = [self._chunk(choice, {"delta": change, "logprobs": None}) for change in changes]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(choice, delta)
        if delta.finish:
            chunks.append(self._chunk(choice, {"delta": {}, "logprobs": None}, delta.finish))
        return chunks

    def _whole(self, choice: Choice) -> dict[str, Any]:
        delta = choice.total
        message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["content"] = delta.content or None
            message["tool_calls"] = [call_object(id, call) for id, call in delta.calls]
        logprobs = self._logprobs(choice, delta)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": delta.finish}

    def _logprobs(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        return (
            {"content": [logprob_object(entry) for entry in delta.logprobs], "refusal": None}
            if delta.logprobs
            else None
        )


def call_object(id: str, call: ToolCall) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprob_object(entry: TokenLogprob) -> dict[str, Any]:
    """Return the object for a token in the API of chats."""

    def one(entry: TokenLogprob) -> dict[str, Any]:
        return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.bytes)}

    return one(entry) | {"top_logprobs": [one(top) for top in entry.top]}
