"""From a request to its answer: the prompt, the grammar and the arguments of `LLM.generate`.

The functions encode text and compile grammars, which may take long: call them on a thread of their own.
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ..llm import BusyError, Generation
from ..llm.chat_template import MARK, Abilities
from ..llm.errors import FieldError
from ..llm.scoring import can_score
from .answer import Answer, Choice, NoTokens
from .chat_request import ChatRequest, template_message
from .echo import Echo
from .errors import ApiError, request_error
from .grammar import Constraint, GrammarError
from .model import ServedModel
from .prompt_scores import PromptScores
from .request import CompletionRequest, GenerationRequest
from .token_rules import token_rules


def start_completion(model: ServedModel, body: CompletionRequest) -> Answer:
    """Start the answers to the prompts of a request. Raises ApiError."""
    body.check_fields()
    count, wants_logprobs = body.n or 1, body.logprobs is not None
    special = body.add_special_tokens is not False
    ids = [_prompt_ids(model, prompt, "prompt", special) for prompt in body.prompts]
    if wants_logprobs:
        _text(model, [], "logprobs")  # raises if the tokens have no text
    scores = [_prompt_scores(model, body, own) for own in ids]
    echoes = [_echo(model, body, *prompt) if body.echo else None for prompt in zip(body.prompts, scores)]
    prompts = [own for own in ids for _ in range(count)]
    if body.max_new_tokens == 0 and (body.echo or body.prompt_logprobs is not None):
        starts: list[Callable] = [partial(NoTokens, own) for own in prompts]
    else:
        starts = _starts(model, body, prompts, "prompt", _constraint(model.grammars.for_completion, body))
    choices = [
        Choice(
            index,
            model,
            start,
            wants_logprobs=wants_logprobs,
            echo=echoes[index // count],
            prompt_scores=scores[index // count],
        )
        for index, start in enumerate(starts)
    ]
    return _started(Answer(model, choices, len(ids)))


def start_chat(model: ServedModel, body: ChatRequest) -> Answer:
    """Start the answer to the messages of a request. Raises ApiError."""
    body.check_fields()
    prompt = chat_prompt(model, body)
    ids = _prompt_ids(model, prompt.text, "messages", special=False)
    functions = {function.name: function.parameters for function in body.functions}
    one_call = body.wants_one_call or model.format.has_one_call
    constraint = _constraint(model.grammars.for_chat, body, prompt.opening)
    scores = _prompt_scores(model, body, ids)
    choices = []
    for index, start in enumerate(_starts(model, body, [ids] * (body.n or 1), "messages", constraint)):
        choices.append(
            Choice(
                index,
                model,
                start,
                model.format.parser(functions, prompt.opening),
                wants_logprobs=bool(body.logprobs),
                one_call=bool(functions) and one_call,
                prompt_scores=scores,
            )
        )
    return _started(Answer(model, choices))


def _constraint(make: Callable[..., Constraint | None], *arguments: Any) -> Constraint | None:
    """Return `make(*arguments)`. Raises ApiError."""
    try:
        return make(*arguments)
    except GrammarError as error:
        raise ApiError(str(error), param=error.param, code=error.code) from error


def _prompt_ids(model: ServedModel, prompt: str | list[int], field: str, special: bool = True) -> list[int]:
    try:
        return model.llm.prompt_ids(prompt, special)
    except ValueError as error:
        raise request_error(error, field) from error


def _text(model: ServedModel, prompt: str | list[int], field: str) -> str:
    """Return a prompt as text. Raises ApiError, which names `field`, if the model has no token bytes."""
    try:
        return prompt if isinstance(prompt, str) else model.llm.text(prompt)
    except FieldError as error:
        raise ApiError(error.about(field), param=field) from error


def _echo(model: ServedModel, body: CompletionRequest, prompt: str | list[int], scores: PromptScores | None) -> Echo:
    """Return the `Echo` of a prompt. Raises ApiError."""
    return Echo(model, _text(model, prompt, "echo"), None if body.logprobs is None else scores, body.logprobs or 0)


def _prompt_scores(model: ServedModel, body: GenerationRequest, ids: list[int]) -> PromptScores | None:
    """Return the log probabilities of a prompt, or None if the request needs none. Raises ApiError."""
    counts = {field: count for field, count in body.prompt_logprob_counts.items() if count is not None}
    if not counts:
        return None
    _text(model, [], next(iter(counts)))  # raises if the tokens have no text
    for field, count in counts.items():
        if not can_score(model.llm.program):
            message = (
                f"{field}: the model {model.name!r} cannot compute the log probabilities of a prompt: export it with "
                "--logprobs and without --no-speculation, or with --outputs logits or both"
            )
            raise ApiError(message, param=field, code="unsupported_parameter")
        try:
            model.llm.score(ids[:1], [], logprobs=count)  # raises for a number that the model does not return
        except ValueError as error:
            raise request_error(error, "prompt", {"logprobs": field}) from error
    return PromptScores(model, ids, max(counts.values()))


def _starts(
    model: ServedModel, body: GenerationRequest, prompts: Sequence[list[int]], field: str, constraint: Any = None
) -> list[Callable[[], Generation]]:
    """Return a function for each choice that starts its generation. It raises ApiError, and BusyError.

    - `prompts`: the token ids of the prompt of each choice.
    - `field`: the field of the request that has the prompt, for messages.
    """
    arguments = body.generate_arguments() | {"allowed_tokens": token_rules(model, body)}

    def start(index: int, ids: list[int]) -> Generation:
        own = {"seed": body.choice_seed(index % (body.n or 1))}
        try:
            if constraint is not None:
                own["allowed_tokens"] = constraint.allowed_tokens()
            return model.llm.generate(ids, **arguments | own)
        except BusyError:
            raise
        except (ValueError, RuntimeError) as error:
            raise request_error(error, field, body.argument_fields) from error

    return [partial(start, index, ids) for index, ids in enumerate(prompts)]


def _started(answer: Answer) -> Answer:
    """Start the choices of an answer, and return it. Raises ApiError if none starts."""
    try:
        answer.start()
    except BusyError as error:
        raise request_error(error, "") from error
    return answer


# The prompt of a chat ----------------------------------------------------------------------


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat: the whole `text` that `render`, the chat template, makes from the messages."""

    text: str
    messages: list[dict[str, Any]]
    render: Callable[[list[dict[str, Any]]], str]

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
        message = f"messages: the model {model.name!r} has no chat template; use /v1/completions"
        raise ApiError(message, param="messages")
    template = model.abilities_for(bool(body.functions))
    messages = [template_message(message) for message in body.messages]
    if "thinking" in template.fields:  # gpt-oss's name for it
        messages = [_with_thinking(message) for message in messages]
    shown = {"name", "description", "parameters"}
    functions = [function.model_dump(exclude_none=True, include=shown) for function in body.functions]
    options = dict(body.chat_template_kwargs or {})
    if "tools" in template.variables:
        if functions:
            options["tools"] = [{"type": "function", "function": {"parameters": {}, **f}} for f in functions]
    else:
        messages = _without_tool_messages(model, messages)
        if functions:
            messages = _with_instructions(model, messages, model.format.instructions(functions))
    if body.reasoning_effort is not None:
        options = _effort_options(model, template, body.reasoning_effort) | options
    if not template.has_text("developer"):
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    if any(m["role"] == "system" for m in messages[1:]) and not model.takes_later_system_messages:
        messages = _without_later_system_messages(messages)
    render = partial(
        model.chat_text,
        options=options,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    try:
        return ChatPrompt(render(messages), messages, render)
    except ValueError as error:
        field = "chat_template_kwargs" if "template_options" in str(error) else "messages"
        raise ApiError(str(error), param=field) from error


def _effort_options(model: ServedModel, template: Abilities, effort: str) -> dict[str, Any]:
    """Return the options of the chat template for an effort of reasoning. Raises ApiError if it has no such options."""
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in template.variables:
        return {"enable_thinking": False}
    if effort == "none" and not model.format.reasoning:
        return {}
    message = f"reasoning_effort: the chat template of {model.name!r} has no use for it, expected null"
    raise ApiError(message, param="reasoning_effort", code="unsupported_parameter")


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
        if is_tool and after_tool:  # many templates want users and assistants to alternate
            message["content"] = f"{written.pop()['content']}\n{message['content']}"
        written.append(message)
        after_tool = is_tool
    return written


def _without_later_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with system messages only at the beginning, and there only one. Others become the user's.

    Such a message is joined with the user's messages beside it: many templates want users and assistants to alternate.
    """
    written = messages[:1]
    for before, message in itertools.pairwise(messages):
        roles = {message["role"], before["role"]}
        if message["role"] == "system" and written[-1]["role"] != "system":
            message = message | {"role": "user"}
        if "system" in roles and message["role"] == written[-1]["role"]:
            message = message | {"content": f"{written.pop()['content']}\n\n{message['content']}"}
        written.append(message)
    return written


def _with_instructions(model: ServedModel, messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages with `text` at the end of the system message, or in a new one if there is none.

    If the template takes no system message, the text is at the beginning of the first message.
    """
    first, *others = messages
    if first["role"] in ("system", "developer"):
        return [first | {"content": f"{first['content']}\n\n{text}"}, *others]
    if model.takes_system_message:
        return [{"role": "system", "content": text}, *messages]
    return [first | {"content": f"{text}\n\n{first['content']}"}, *others]
