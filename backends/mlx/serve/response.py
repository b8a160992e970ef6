"""The responses of `/v1/completions` and `/v1/chat/completions`: whole answers, and the chunks of a stream.

A `Total` is the accumulated answer of one choice. The `formats` are those in which models write tool calls and
reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .answer import Answer, Choice
from .chat_request import ChatRequest, text_input
from .delta import LOWEST_LOGPROB, Call, Delta, TokenLogprob
from .errors import ApiError
from .formats.base import REASONING
from .formats.reader import ARGUMENTS, CALL, CALL_END
from .model import text_of
from .request import GenerationRequest
from .streaming import DONE, ServerSentEvents


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


class CompletionFormat(ServerSentEvents):
    """Builds the JSON objects for the answer to a completion request."""

    ending = DONE
    id_prefix, response_type, chunk_type = "cmpl", "text_completion", "text_completion"

    def __init__(self, answer: Answer, body: GenerationRequest):
        self._answer, self._includes_usage = answer, body.include_usage
        self._has_continuous_usage, self._prompt_count = body.has_continuous_usage, body.prompt_logprobs
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
        """Return the chunks of a stream for a delta. The last chunk of a choice has the finish reason."""
        chunks = []
        if delta.text or delta.logprobs:
            text = {"text": delta.text, "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None}
            chunks.append(self._chunk(choice, text))
        if delta.finish:
            chunks.append(self._chunk(choice, {"text": "", "logprobs": None}, delta.finish))
        return chunks

    def error_chunks(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the chunk for an error that ends the answer."""
        return [error.openai_body]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunk that follows the answer if the client asked for the numbers of tokens."""
        return [self._object(self.chunk_type, []) | {"usage": usage(self._answer)}] if self._includes_usage else []

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._common | {"object": kind, "choices": choices}

    def _chunk(self, choice: Choice, value: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        chunk = self._object(self.chunk_type, [{"index": choice.index, **value, "finish_reason": finish}])
        if not self._includes_usage:
            return chunk
        return chunk | {"usage": usage(self._answer) if self._has_continuous_usage else None}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.total.logprobs) if choice.wants_logprobs else None
        text = {"text": choice.total.content, "logprobs": logprobs}
        return {"index": choice.index, **text, "finish_reason": choice.total.finish} | self._prompt_logprobs(choice)

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return the member `prompt_logprobs` if the client asked for it, as in vLLM's API."""
        if self._prompt_count is None:
            return {}
        scores, model = choice.prompt_scores, self._answer.model

        def entry(id: int, logprob: float, rank: int | None) -> dict[str, Any]:
            name = text_of([model.token_bytes(id)])
            return {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": name}

        entries: list[dict[str, Any] | None] = []
        for id, (logprob, top) in zip(scores.ids, scores.computed, strict=True):
            if logprob is None:
                entries.append(None)
                continue
            # The token itself comes first. Only if it is one of the most likely ones, its rank is known.
            by_id = {str(id): entry(id, logprob, None)}
            for rank, (other, value) in enumerate(top[: self._prompt_count], 1):
                by_id[str(other)] = entry(other, value, rank)
            entries.append(by_id)
        return {"prompt_logprobs": entries}

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [token_name(entry.bytes) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            # As in OpenAI's API, with the token itself, even if it is not one of the most likely ones.
            "top_logprobs": [None if entry.logprob is None else top_by_name([*entry.top, entry]) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }


class ChatFormat(CompletionFormat):
    """Builds the JSON objects for the answer to a chat request."""

    def __init__(self, answer: Answer, body: ChatRequest):
        super().__init__(answer, body)
        self._custom_names = body.custom_names

    id_prefix, response_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def response(self) -> dict[str, Any]:
        return super().response() | self._prompt_logprobs(self._answer.choices[0])

    def first_chunks(self) -> list[dict[str, Any]]:
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return [self._chunk(choice, start) for choice in self._answer.choices]

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if change := self._change(delta):
            logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
            chunks.append(self._chunk(choice, {"delta": change, "logprobs": logprobs}))
        if delta.finish:
            chunks.append(self._chunk(choice, {"delta": {}, "logprobs": None}, delta.finish))
        return chunks

    def _change(self, delta: Delta) -> dict[str, Any]:
        """Return the member `delta` of a chunk, or an empty dict if nothing changes."""
        if delta.kind == CALL:
            return {"tool_calls": [{"index": delta.call.index, **self._call(delta.call, arguments="")}]}
        if delta.call is not None and delta.call.name in self._custom_names:
            change = {"index": delta.call.index, "custom": {"input": text_input(delta.call.arguments)}}
            return {"tool_calls": [change]} if delta.kind == CALL_END else {}
        if delta.kind == ARGUMENTS:
            return {"tool_calls": [{"index": delta.call.index, "function": {"arguments": delta.text}}]}
        if delta.kind == REASONING:
            return {"reasoning_content": delta.text}
        return {"content": delta.text} if delta.text or delta.logprobs else {}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        total = choice.total
        message: dict[str, Any] = {"role": "assistant", "content": total.content, "refusal": None}
        if total.reasoning:
            message["reasoning_content"] = total.reasoning
        if total.calls:
            message["content"] = total.content or None
            message["tool_calls"] = [self._call(call, call.arguments) for call in total.calls]
        logprobs = self._logprobs(total.logprobs) if choice.wants_logprobs else None
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": total.finish}

    def _call(self, call: Call, arguments: str) -> dict[str, Any]:
        if call.name in self._custom_names:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text_input(arguments)}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        return {"content": [logprob_object(entry) for entry in entries], "refusal": None}


def token_name(data: bytes) -> str:
    """Return a token's name in the API of completions: its text, or `bytes:\\xf0\\x9f` for a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def top_by_name(top: Sequence[TokenLogprob]) -> dict[str, float]:
    """Return the log probabilities of tokens by name, in their order. The first of the tokens with a name counts."""
    values: dict[str, float] = {}
    for entry in top:
        values.setdefault(token_name(entry.bytes), entry.logprob)
    return values


def logprob_object(entry: TokenLogprob) -> dict[str, Any]:
    """Return the object for a token in the API of chats."""

    def one(entry: TokenLogprob) -> dict[str, Any]:
        return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.bytes)}

    return one(entry) | {"top_logprobs": [one(top) for top in entry.top]}
