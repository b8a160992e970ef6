"""What the tokens of an answer add to it: parts of text or calls, and log probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .formats.base import REASONING
from .formats.reader import ARGUMENTS, CALL, CALL_END, CONTENT
from .model import ServedModel, text_of

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its bytes and log probability, and the most likely tokens in its place.

    - `logprob`: None for the first token of a prompt, which the model does not predict.
    - `offset`: the number of characters of the text before the character to which the first byte of the token belongs.
      The text is the answer, after the prompt if the prompt is repeated.
    """

    bytes: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()
    offset: int = 0

    @property
    def text(self) -> str:
        return text_of([self.bytes])


@dataclass
class Call:
    """A tool call, as far as it is generated. `arguments` is JSON text, and valid if the call is complete.

    `index`: the number of calls before it.
    """

    index: int
    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass
class Delta:
    """What some tokens add to a choice: a part, as in `formats.reader`, and the log probabilities of the tokens.

    - `call`: the call to which a part CALL, ARGUMENTS or CALL_END belongs.
    - `finish`: the finish reason. Only the last delta has one.
    """

    kind: str = CONTENT
    text: str = ""
    call: Call | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Total:
    """The sum of the deltas of a choice. `parts`: the deltas in order; adjacent ones of the same kind are joined."""

    parts: list[Delta] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        if self.parts and self.parts[-1].kind == delta.kind:
            self.parts[-1].text += delta.text
            self.parts[-1].logprobs += delta.logprobs
        else:
            self.parts.append(replace(delta, logprobs=[*delta.logprobs]))
        if delta.kind == CALL:
            self.calls.append(delta.call)
        elif delta.kind == ARGUMENTS:
            delta.call.arguments += delta.text
        elif delta.kind == CALL_END:
            delta.call.is_complete = True
        self.finish = delta.finish

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == CONTENT)

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == REASONING)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for part in self.parts for entry in part.logprobs]


class Offsets:
    """The places of tokens in a text, as in `TokenLogprob.offset`. The first token begins at the character `start`."""

    def __init__(self, start: int = 0):
        self._decoder, self._length = codecs.getincrementaldecoder("utf-8")("replace"), start

    def take(self, data: bytes) -> int:
        """Return the place of the next token, whose bytes are `data`. A special token, which has no text, has none."""
        pending, _ = self._decoder.getstate()  # the beginning of a character
        offset = self._length + max(len((pending + data[:1]).decode(errors="replace")) - 1, 0)
        self._length += len(self._decoder.decode(data))
        return offset


def token_logprob(
    model: ServedModel, id: int, logprob: float | None, top: Sequence[tuple[int, float]], offset: int
) -> TokenLogprob:
    """Return the `TokenLogprob` of a token. `top` has the most likely tokens, with their log probabilities."""

    def entry(id: int, logprob: float | None, *rest: Any) -> TokenLogprob:
        return TokenLogprob(model.token_bytes(id), logprob and max(logprob, LOWEST_LOGPROB), *rest)

    return entry(id, logprob, tuple(entry(*other) for other in top), offset)
