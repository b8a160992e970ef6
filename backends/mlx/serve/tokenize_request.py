"""`/tokenize`, `/detokenize` and `/tokenizer_info`: token ids of texts and chats, and texts of token ids.

These are endpoints of vLLM. As there, a request may leave out the model if the server has only one.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from .chat_prompt import all_ids, chat_prompt
from .chat_request import ChatRequest, Message, Tool
from .errors import ApiError, field_error
from .model import ServedModel, text_of
from .parts import RequestPart, Several

MAX_TOKENS = 2**20


class TokenizeRequest(RequestPart):
    """Either `prompt` or `messages`.

    - `add_special_tokens`: add the special tokens that the model expects around a text.
    - `return_token_strs`: also return the text of each token.
    - `add_generation_prompt`, `continue_final_message`: as in a chat.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Several[Message] | None = Field(None, min_length=1)
    tools: Several[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("got both or neither of prompt and messages, expected one")
        return self


class DetokenizeRequest(RequestPart):
    model: str | None = None
    tokens: Several[int] = Field(max_length=MAX_TOKENS)


def tokenize(model: ServedModel, body: TokenizeRequest) -> dict[str, Any]:
    """Return the response of `/tokenize`. Raises ApiError and ValueError."""
    if body.messages is not None:
        names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        chat = ChatRequest(model=model.name, **{name: getattr(body, name) for name in names})
        chat.check_fields()
        ids = all_ids(model, chat_prompt(model, chat))
    else:
        ids = model.llm.encode(body.prompt, special=body.add_special_tokens)
    result: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.llm.program.max_context_len}
    if body.return_token_strs:
        result["token_strs"] = [text_of([model.token_bytes(token)]) for token in ids]
    return result


def detokenize(model: ServedModel, body: DetokenizeRequest) -> dict[str, Any]:
    """Return the response of `/detokenize`. Raises ApiError and ValueError."""
    size = model.llm.program.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise field_error("tokens", f"id {token} is outside the vocabulary [0, {size})")
    return {"prompt": text_of([model.token_bytes(token) for token in body.tokens])}


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """Return the response of `/tokenizer_info`: the special tokens, such as `eos_token`, and the chat template."""
    tokenizer = model.llm.tokenizer
    if tokenizer is None:
        raise ApiError(f"the model {model.name!r} has no tokenizer")
    return {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}
