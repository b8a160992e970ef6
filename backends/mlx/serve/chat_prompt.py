"""The prompt of a chat: what the chat template makes of the messages, tools and options of a request."""

from __future__ import annotations

import os.path
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ..llm.chat_template import MARK, Abilities
from ..llm.errors import FieldError
from .chat_request import ChatRequest, template_message
from .errors import argument_error, field_error, request_error
from .model import ServedModel

if TYPE_CHECKING:
    from ..llm.vision.processor import Encoding
    from ..llm.vision.sound import Sound

# The variables of chat templates that switch the reasoning on or off.
THINKING_VARIABLES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat: the whole `text` that `render`, the chat template, makes from the messages.

    In the text, special tokens that the client wrote are cut; see `llm.special_text`. `media` are the data URLs of
    pictures and the sounds in the messages, for which the text has placeholders.
    """

    text: str
    messages: list[dict[str, Any]]
    render: Callable[[list[dict[str, Any]]], str]
    media: tuple[str | Sound, ...] = ()

    @cached_property
    def opening(self) -> str:
        """The end of the text that begins the answer. It may open a section of the answer, such as `<think>`.

        It is the text that the template writes after the last message: what stays when this message gets longer. If
        nothing is written after a message of the assistant, the answer continues this message, and `opening` is its
        content.
        """
        last = self.messages[-1]
        try:
            other = self.render([*self.messages[:-1], last | {"content": last["content"] + MARK}])
        except ValueError:  # some templates reject tool calls beside content
            return self.text
        opening = os.path.commonprefix([self.text[::-1], other[::-1]])[::-1]
        return last["content"] if last["role"] == "assistant" and not opening.strip() else opening


def chat_prompt(model: ServedModel, body: ChatRequest) -> ChatPrompt:
    """Return the prompt for the messages and tools of a request. Raises ApiError."""
    if not model.llm.chats:
        raise field_error("messages", f"the model {model.name!r} has no chat template; use /v1/completions")
    template = model.abilities_for(bool(body.functions))
    messages = [template_message(message) for message in body.messages]
    media = tuple(medium for message in body.messages for medium in getattr(message, "media", ()))
    if media and model.llm.pictures is None:
        raise field_error(
            "messages", f"the model {model.name!r} takes no pictures or sounds", code="unsupported_parameter"
        )
    if "thinking" in template.fields:  # gpt-oss's name for it
        messages = [_with_thinking(message) for message in messages]
    shown = {"name", "description", "parameters"}
    functions = [function.model_dump(exclude_none=True, include=shown) for function in body.functions]
    options = dict(body.chat_template_kwargs or {})
    if not body.parse_special:
        cut = model.llm.tokenizer.special_text.cut
        # The tags of reasoning in earlier answers, which clients send back, are those of the model.
        tags = [tag for section in model.format.reasoning for tag in (section.open, section.close)]
        messages = [cut(m, tags if m["role"] == "assistant" else ()) for m in messages]
        functions, options = cut([functions, options])
    if "tools" in template.variables:
        if functions:
            options["tools"] = [{"type": "function", "function": function} for function in functions]
    else:
        messages = _without_tool_messages(model, messages)
        if functions:
            messages = _with_instructions(messages, model.format.instructions(functions))
    if body.reasoning_effort is not None:
        options = _effort_options(model, template, body.reasoning_effort) | options
    if body.thinks is not None:
        options = dict.fromkeys(template.variables.intersection(THINKING_VARIABLES), body.thinks) | options
    if not template.has_text("developer"):
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    render = partial(
        model.chat_text,
        options=options,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    try:
        return ChatPrompt(render(messages), messages, render, media)
    except FieldError as error:
        raise argument_error(error, {"template_options": "chat_template_kwargs"}) from error


def all_ids(model: ServedModel, prompt: ChatPrompt) -> list[int]:
    """Return the token ids of a prompt, which may be longer than the context. Raises ValueError."""
    if prompt.media:
        return chat_ids(model, prompt)[0]
    return model.llm.tokenizer.encode_chat(prompt.text)


def chat_ids(model: ServedModel, prompt: ChatPrompt) -> tuple[list[int], list[Encoding]]:
    """Return the token ids of a prompt and its pictures. Raises ApiError, also if it is longer than the context."""
    try:
        if prompt.media:
            return model.llm.picture_ids(prompt.text, prompt.media)
        return model.llm.chat_ids(prompt.text), []
    except ValueError as error:
        raise request_error(error, "messages") from error


def _effort_options(model: ServedModel, template: Abilities, effort: str) -> dict[str, Any]:
    """Return the options of the chat template for an effort of reasoning. Raises ApiError if it has no such options."""
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort}
    if effort == "none" and (variables := template.variables.intersection(THINKING_VARIABLES)):
        return dict.fromkeys(variables, False)
    if effort == "none" and not model.format.reasoning:
        return {}
    problem = f"the chat template of {model.name!r} has no use for it, expected null"
    raise field_error("reasoning_effort", problem, code="unsupported_parameter")


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning as `thinking`, which gpt-oss's template rejects beside content and calls."""
    if "reasoning_content" not in message or message["content"] and "tool_calls" in message:
        return message
    return message | {"thinking": message["reasoning_content"]}


def _without_tool_messages(model: ServedModel, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tool calls and their results written as text, for a chat template without tools."""
    written: list[dict[str, Any]] = []
    after_tool = False
    for message in messages:
        is_tool = message["role"] == "tool"
        if is_tool:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif calls := message.get("tool_calls"):
            text = model.format.write_calls([call["function"] for call in calls])
            message = {"role": "assistant", "content": f"{message['content']}\n{text}".strip()}
        if is_tool and after_tool:  # the results of one answer are one turn
            message["content"] = f"{written.pop()['content']}\n{message['content']}"
        written.append(message)
        after_tool = is_tool
    return written


def _with_instructions(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages with `text` at the end of the system message, or in a new one if there is none."""
    first, *others = messages
    if first["role"] in ("system", "developer"):
        return [first | {"content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, *messages]
