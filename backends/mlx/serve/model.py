"""A language model as the server uses it: with its name, and the format of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property
from typing import Any

from ..llm import LLM
from ..llm.chat_template import Abilities, abilities
from ..llm.sampling_parameters import PENALTIES
from ..llm.scoring import can_score
from .formats import AnswerFormat, detect, format_name
from .grammar import Grammars


class ServedModel:
    """A model with the name that it has in the API.

    - `tool_format`: the name of the format of tool calls, or None to detect it from the chat template.

    Attributes: `llm`, `name` and `format`; `adapter`, the name of the adapter with which the model answers, or None;
    and `base`, its name without an adapter. With one, `name` is that of the adapter.

    Raises KeyError for an unknown format.
    """

    def __init__(self, llm: LLM, name: str, tool_format: str | None = None):
        self.llm, self.name, self.base = llm, name, name
        self.adapter: str | None = None
        tool_template = (llm.tokenizer.tool_template if llm.tokenizer is not None else None) or ""
        self._uses_tool_template = tool_format is not None or format_name(tool_template, self._has_token) is not None
        templates = self._template_for(has_tools=False) + self._template_for(has_tools=True)
        self.format: AnswerFormat = detect(templates, self._has_token, tool_format)
        self.grammars = Grammars(self)

    def with_adapter(self, adapter: str) -> ServedModel:
        """Return this model as it answers with an adapter. The two share everything else."""
        self.scoring_threads  # noqa: B018  (the copy gets them)
        adapted = copy(self)
        adapted.name = adapted.adapter = adapter
        return adapted

    def abilities_for(self, has_tools: bool) -> Abilities:
        """Return the abilities of the chat template for chats with tools or without."""
        return abilities(self._template_for(has_tools))

    def _template_for(self, has_tools: bool) -> str:
        """Return the source of the chat template for chats with tools or without, or "".

        A template for tools is left out if it asks for calls in an unknown format, such as that of Command R. The
        server then writes its own instructions.
        """
        if self.llm.tokenizer is None:
            return ""
        return self.llm.tokenizer.template_for(has_tools and self._uses_tool_template) or ""

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] = {}, **arguments: Any
    ) -> str:
        """Return the text of a chat in the template for it, with the arguments of `Tokenizer.chat_text`."""
        template = self._template_for(bool(options.get("tools")))
        return self.llm.tokenizer.chat_text(messages, options, template=template, **arguments)

    def _has_token(self, text: str) -> bool:
        return self.token_id(text) is not None

    def token_id(self, text: str) -> int | None:
        """Return the id of the token whose name is `text`, or None."""
        return None if self.llm.tokenizer is None else self.llm.tokenizer.backend.token_to_id(text)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The names of the special tokens, which have no text, by id."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            return {}
        return {id: tokenizer.backend.id_to_token(id) for id in tokenizer.special_ids}

    @cached_property
    def marker_tokens(self) -> dict[int, str]:
        """The names of the special tokens that occur in the markers of the answer format, by id."""
        markers = self.format.markers()
        return {id: name for id, name in self.special_tokens.items() if any(name in marker for marker in markers)}

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token. For a special token, these are the bytes of its name."""
        name = self.special_tokens.get(token)
        return name.encode() if name is not None else self.llm.token_bytes(token)

    @cached_property
    def scoring_threads(self) -> ThreadPoolExecutor:
        """The threads that compute log probabilities of prompts."""
        return ThreadPoolExecutor(self.llm.rows, thread_name_prefix="score")

    def close(self) -> None:
        self.llm.close()

    def description(self) -> dict[str, Any]:
        """Return the fields of the model's object in `/v1/models` that are known once it is loaded."""
        program = self.llm.program
        # The length has the names that clients of other servers and of Anthropic read.
        names = ("context_length", "max_model_len", "max_input_tokens", "max_tokens")
        return {
            "has_chat_template": self.llm.chats,
            "capabilities": self.capabilities,
            "default_sampling": self.llm.defaults,
            "max_adapters": program.get("adapter_slots", 0),
        } | dict.fromkeys(names, program.max_context_len)

    @property
    def capabilities(self) -> dict[str, bool]:
        """What requests may ask for, by the name of a field or of a thing."""
        program = self.llm.program
        return {
            "chat": self.llm.chats,
            "tools": self.llm.chats,
            "images": self.llm.chats and self.llm.pictures is not None and not self.llm.pictures.takes_sounds,
            "audio": self.llm.chats and self.llm.pictures is not None and self.llm.pictures.takes_sounds,
            "forced_tools": not self.grammars.obstacle,
            "response_format": not self.grammars.obstacle,
            "logprobs": program.has_logits or program.logprobs > 0,
            "prompt_logprobs": can_score(program),
            **{name: program.has_logits or program.takes(name) for name in (*PENALTIES, "logit_bias", "seed")},
        }


def text_of(values: Sequence[bytes]) -> str:
    """Return the text of a sequence of token bytes. Invalid UTF-8 becomes U+FFFD."""
    return b"".join(values).decode(errors="replace")
