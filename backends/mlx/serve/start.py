"""From a request to its answer: the grammar and the arguments of `LLM.generate`.

The functions encode text and compile grammars, which may take long: call them on a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..llm import BusyError, Generation
from ..llm.errors import FieldError
from ..llm.scoring import can_score
from .answer import Answer, Choice, NoTokens
from .chat_prompt import chat_ids, chat_prompt
from .chat_request import ChatRequest
from .echo import Echo
from .errors import argument_error, field_error, request_error
from .grammar import Constraint, GrammarError
from .model import ServedModel
from .prompt_scores import PromptScores
from .request import CompletionRequest, GenerationRequest
from .token_rules import token_rules


def start_completion(model: ServedModel, body: CompletionRequest) -> Answer:
    """Start the answers to the prompts of a request. Raises ApiError."""
    body.check_fields()
    count, wants_logprobs = body.n or 1, body.logprobs is not None
    ids = [_prompt_ids(model, body, prompt) for prompt in body.prompts]
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
    ids, pictures = chat_ids(model, prompt)
    functions = {function.name: function.parameters for function in body.functions}
    one_call = body.wants_one_call or model.format.has_one_call
    constraint = _constraint(model.grammars.for_chat, body, prompt.opening)
    if pictures and any(count is not None for count in body.prompt_logprob_counts.values()):
        raise field_error("prompt_logprobs", "got a prompt with pictures, expected text")
    scores = _prompt_scores(model, body, ids)
    choices = []
    for index, start in enumerate(_starts(model, body, [ids] * (body.n or 1), "messages", constraint, pictures)):
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
        raise argument_error(error, code=error.code) from error


def _prompt_ids(model: ServedModel, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    """Return the token ids of a prompt. Raises ApiError."""
    special = body.add_special_tokens is not False
    try:
        if body.parse_special is False and isinstance(prompt, str) and model.llm.tokenizer is not None:
            beginning = model.llm.encode("", special) if special else []
            return beginning + model.llm.chat_ids(model.llm.tokenizer.special_text.cut(prompt))
        return model.llm.prompt_ids(prompt, special)
    except ValueError as error:
        raise request_error(error, "prompt") from error


def _text(model: ServedModel, prompt: str | list[int], field: str) -> str:
    """Return a prompt as text. Raises ApiError, which names `field`, if the model has no token bytes."""
    try:
        return prompt if isinstance(prompt, str) else model.llm.text(prompt)
    except FieldError as error:
        raise field_error(field, error.problem) from error


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
            problem = (
                f"the model {model.name!r} cannot compute the log probabilities of a prompt: export it with --logprobs "
                "and without --no-speculation, or with --outputs logits or both"
            )
            raise field_error(field, problem, code="unsupported_parameter")
        try:
            model.llm.score(ids[:1], [], logprobs=count)  # raises for a number that the model does not return
        except ValueError as error:
            raise request_error(error, "prompt", {"logprobs": field}) from error
    return PromptScores(model, ids, max(counts.values()))


def _starts(
    model: ServedModel,
    body: GenerationRequest,
    prompts: Sequence[list[int]],
    field: str,
    constraint: Any = None,
    pictures: Sequence[Any] = (),
) -> list[Callable[[], Generation]]:
    """Return a function for each choice that starts its generation. It raises ApiError, and BusyError.

    - `prompts`: the token ids of the prompt of each choice.
    - `field`: the field of the request that has the prompt, for messages.
    - `pictures`: those of all prompts, as `LLM.picture_ids` returns them.
    """
    arguments = body.generate_arguments(model.llm.defaults)
    arguments |= {"allowed_tokens": token_rules(model, body), "adapter": model.adapter, "images": pictures}

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
