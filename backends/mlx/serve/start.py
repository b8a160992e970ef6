"""From a request to its answer: the prompt, the grammar and the arguments of `LLM.generate`.

The functions encode text and compile grammars, which may take long: call them on a thread of their own.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..llm import Generation
from .answer import Answer, Choice
from .chat_request import ChatRequest, template_message
from .errors import ApiError, request_error
from .grammar import GrammarError
from .model import ServedModel
from .request import CompletionRequest, GenerationRequest


def start_completion(model: ServedModel, body: CompletionRequest) -> Answer:
    """Start the answers to the prompts of a request. Raises ApiError."""
    body.check_fields()
    prompts = [(prompt, _prompt_ids(model, prompt, "prompt")) for prompt in body.prompts]
    per_choice = [
        (ids, _echo(model, prompt) if body.echo else "") for prompt, ids in prompts for _ in range(body.n or 1)
    ]
    generations = _generate(model, body, [ids for ids, _ in per_choice], "prompt")
    wants_logprobs = body.logprobs is not None
    choices = [
        Choice(index, model, generation, wants_logprobs=wants_logprobs, echo=echo)
        for index, (generation, (_, echo)) in enumerate(zip(generations, per_choice))
    ]
    return Answer(model, choices, len(prompts))


def start_chat(model: ServedModel, body: ChatRequest) -> Answer:
    """Start the answers to the messages of a request. Raises ApiError."""
    body.check_fields()
    prompt = chat_prompt(model, body)
    functions = {function.name: function.parameters for function in body.functions}
    try:
        constraint = model.grammars.for_chat(body, prompt.opening)
    except GrammarError as error:
        raise ApiError(str(error), param=error.param, code=error.code) from error
    ids = model.llm.encode(prompt.text, special=False)
    generations = _generate(model, body, [ids] * (body.n or 1), "messages", constraint)
    choices = []
    for index, generation in enumerate(generations):
        choices.append(
            Choice(
                index, model, generation, model.format.parser(functions, prompt.opening),
                wants_logprobs=bool(body.logprobs), one_call=bool(functions) and body.parallel_tool_calls is False,
            )
        )  # fmt: skip
    return Answer(model, choices)


def _echo(model: ServedModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else model.llm.text(prompt)


def _prompt_ids(model: ServedModel, prompt: str | list[int], field: str) -> list[int]:
    try:
        return model.llm.encode(prompt)
    except ValueError as error:
        raise request_error(error, field, "") from error


def _generate(
    model: ServedModel, body: GenerationRequest, prompts: Sequence[list[int]], field: str, constraint: Any = None
) -> list[Generation]:
    """Start the generation of all choices, or of none. Raises ApiError.

    - `prompts`: the token ids of the prompt of each choice.
    - `field`: the field of the request that has the prompt, for messages.
    """
    arguments = body.generate_arguments()
    choices = body.n or 1
    started: list[Generation] = []
    try:
        for index, ids in enumerate(prompts):
            arguments["seed"] = body.choice_seed(index % choices)
            if constraint is not None:
                arguments["allowed_tokens"] = constraint.allowed_tokens(len(ids), arguments["max_new_tokens"])
            started.append(model.llm.generate(ids, **arguments))
    except (ValueError, RuntimeError) as error:
        for generation in started:
            generation.close()
        raise request_error(error, field, body.max_tokens_field) from error
    return started


# The prompt of a chat ----------------------------------------------------------------------


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat: its whole `text`, and `opening`, the end of it that begins the answer.

    `opening` may open a section of the answer, such as `<think>`. It is the text that the chat template writes after
    the last message. If the template writes nothing after a message of the assistant, the answer continues this
    message, and `opening` is its content.
    """

    text: str
    opening: str


def chat_prompt(model: ServedModel, body: ChatRequest) -> ChatPrompt:
    """Return the prompt for the messages and tools of a request. Raises ApiError."""
    if not model.llm.chats:
        message = f"messages: the model {model.name!r} has no chat template; use /v1/completions"
        raise ApiError(message, param="messages")
    messages = [template_message(message) for message in body.messages]
    functions = [function.model_dump(exclude_none=True, exclude={"strict"}) for function in body.functions]
    options = dict(body.chat_template_kwargs or {})
    if "tools" in model.template:
        if functions:
            options["tools"] = [{"type": "function", "function": {"parameters": {}, **f}} for f in functions]
    else:
        messages = _without_tool_messages(model, messages)
        if functions:
            messages = _with_system_text(messages, model.format.instructions(functions))
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in model.template:
            message = f"reasoning_effort: the chat template of {model.name!r} has no use for it, expected null"
            raise ApiError(message, param="reasoning_effort", code="unsupported_parameter")
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if "developer" not in model.template:
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    try:
        text = model.llm.tokenizer.chat_text(messages, options)
    except ValueError as error:
        field = "chat_template_kwargs" if "template_options" in str(error) else "messages"
        raise ApiError(str(error), param=field) from error
    return ChatPrompt(text, _opening(model, messages, options, text))


def _opening(model: ServedModel, messages: list[dict[str, Any]], options: dict[str, Any], text: str) -> str:
    """Return `opening` of `ChatPrompt`. It is the end of `text` that stays when the last message gets longer."""
    last = messages[-1]
    longer = last | {"content": last["content"] + "."}
    try:
        other = model.llm.tokenizer.chat_text([*messages[:-1], longer], options)
    except ValueError:  # some templates reject tool calls beside content
        return text
    opening = os.path.commonprefix([text[::-1], other[::-1]])[::-1]
    return last["content"] if last["role"] == "assistant" and not opening.strip() else opening


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
        if is_tool and after_tool:  # many templates want users and assistants to alternate
            message["content"] = f"{written.pop()['content']}\n{message['content']}"
        written.append(message)
        after_tool = is_tool
    return written


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages with `text` at the end of the system message, or in a new one if there is none."""
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
    return [first, *messages[1:]]
