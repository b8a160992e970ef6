"""Which tokens may follow in an answer, by vLLM's fields `allowed_token_ids`, `bad_words` and `min_tokens`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..llm.sampling_parameters import TOKENS_PER_MASK_WORD, mask_word_count
from .errors import field_error
from .model import ServedModel
from .request import GenerationRequest


def token_rules(model: ServedModel, body: GenerationRequest) -> TokenRules | None:
    """Return the rules of a request, or None if it has none. Raises ApiError if the model cannot follow them."""
    fields = [name for name in ("allowed_token_ids", "bad_words") if getattr(body, name)]
    if not fields:
        return None
    program = model.llm.program
    if not program.takes("allowed_tokens"):
        problem = (
            f"the model {model.name!r} was exported without allowed_tokens in its head; export it with --allowed-tokens"
        )
        raise field_error(fields[0], problem, code="unsupported_parameter")
    for token in body.allowed_token_ids or []:
        if not 0 <= token < program.vocab_size:
            raise field_error("allowed_token_ids", f"id {token} is outside the vocabulary [0, {program.vocab_size})")
    return TokenRules(
        program.vocab_size,
        allowed=body.allowed_token_ids,
        bad_sequences=[ids for word in body.bad_words or [] for ids in _spellings(model, word)],
        min_tokens=body.min_tokens or 0,
        stop_ids={*(body.stop_token_ids or [])} | (set() if body.ignore_eos else model.llm.eos_ids),
        field=fields[-1],
    )


def _spellings(model: ServedModel, word: str) -> list[list[int]]:
    """Return the tokens of a word, at the beginning of a text and after a space. Raises ApiError if it has none."""
    if model.llm.tokenizer is None:
        raise field_error("bad_words", "the model has no tokenizer", code="unsupported_parameter")
    bare = word.lstrip(" ")
    spellings = [model.llm.encode(text, special=False) for text in (bare, f" {bare}")]
    if not bare or not all(spellings):
        raise field_error("bad_words", f"{word!r} has no tokens")
    return spellings


class TokenRules:
    """The argument `allowed_tokens` of `LLM.generate`: returns the mask for the next token.

    - `allowed`: the tokens that may be drawn, or None for all.
    - `bad_sequences`: of each of these sequences of tokens, the last one may not follow the others.
    - `stop_ids`: may not be drawn before an answer has `min_tokens` tokens.
    - `field`: the field of the request that an error names.

    The mask depends on the tokens of the answer only. Calling this object raises ApiError if no token may follow.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Iterable[int] | None,
        bad_sequences: Iterable[Sequence[int]],
        min_tokens: int,
        stop_ids: Collection[int],
        field: str,
    ):
        import numpy

        self._field, self._min_tokens, self._stop_ids = field, min_tokens, stop_ids
        self._last_tokens: dict[tuple[int, ...], set[int]] = defaultdict(set)  # by the tokens in front of them
        for *before, last in bad_sequences:
            self._last_tokens[tuple(before)].add(last)
        self._lengths = sorted({len(before) for before in self._last_tokens})
        self._bits = numpy.zeros(mask_word_count(vocab_size) * TOKENS_PER_MASK_WORD, dtype=numpy.uint8)
        self._bits[slice(vocab_size) if allowed is None else [*allowed]] = 1

    def __call__(self, answer: Sequence[int]) -> Any:
        import numpy

        bits = self._bits.copy()
        for length in self._lengths:
            if length <= len(answer):
                bits[[*self._last_tokens.get(tuple(answer[len(answer) - length :]), ())]] = 0
        if len(answer) < self._min_tokens:
            bits[[*self._stop_ids]] = 0
        if not bits.any():
            raise field_error(self._field, f"no token may follow after {len(answer)} tokens")
        return numpy.packbits(bits, bitorder="little").view(numpy.int32)
