"""Shortens a chat whose prompt is longer than the context."""

from __future__ import annotations

from collections.abc import Sequence

from .chat_prompt import chat_ids, chat_prompt
from .chat_request import ChatRequest, Message
from .errors import ApiError
from .model import ServedModel


def without_oldest_turns(model: ServedModel, body: ChatRequest) -> ChatRequest:
    """Return the request with as few of its oldest turns left out as necessary for its prompt to fit into the context.

    System messages and the last turn stay. A turn begins with a message of the user. Half of the context, or the limit
    of the answer if this is less, is left for the answer. Returns the request as it is if its prompt fits.
    """
    context = model.llm.program.max_context_len
    room = context - min(body.max_new_tokens or context, context // 2)

    def fits(messages: Sequence[Message], longest: int) -> bool:
        prompt = chat_prompt(model, body.model_copy(update={"messages": list(messages)}))
        try:
            return len(chat_ids(model, prompt)[0]) <= longest
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return False

    if fits(body.messages, context):
        return body
    systems = [message for message in body.messages if message.role in ("system", "developer")]
    turns = [message for message in body.messages if message.role not in ("system", "developer")]
    begins = [place for place, message in enumerate(turns) if message.role == "user" and place > 0]
    low, high = 0, len(begins) - 1  # the first of `begins` from which the rest fits
    if high < 0:
        return body
    while low < high:
        middle = (low + high) // 2
        if fits([*systems, *turns[begins[middle] :]], room):
            high = middle
        else:
            low = middle + 1
    return body.model_copy(update={"messages": [*systems, *turns[begins[low] :]]})
