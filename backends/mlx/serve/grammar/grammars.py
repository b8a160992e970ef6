"""Grammars for answers: JSON that follows a schema, and calls of functions. xgrammar computes the masks of tokens.

The mask is an input of the program, which draws one of the allowed tokens; see `allowed_tokens` of `LLM.generate`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...llm.sampling_parameters import TOKENS_PER_MASK_WORD, mask_word_count
from ..formats.harmony import MESSAGE, Harmony
from .end_finder import CACHE_BYTES, EndFinder, marker_bytes
from .gbnf import checked_grammar, repaired
from .json_schema import MAX_SCHEMA_CHARACTERS, SchemaError, check_pattern, check_schema, reason
from .pattern import rule, with_rules
from .token_budget import TokenBudget

if TYPE_CHECKING:
    from ..chat_request import ChatRequest, Function
    from ..forms import Form
    from ..model import ServedModel
    from ..request import CompletionRequest, GenerationRequest

# The ids of the tokens that open and close reasoning, and whether the prompt opens it; see `Grammars._reasoning`.
Reasoning = tuple[int | None, int | None, bool]
MAX_MASK_SECONDS = 1.0  # of the processor, for one mask: meanwhile, the engine draws no tokens for any request
CHECKED_SYMBOLS = 32  # a grammar is accepted if it admits an answer of this length, or a shorter complete one


class GrammarError(ValueError):
    """Raised for a request whose grammar this server cannot follow. `param` is the field of the request."""

    def __init__(self, message: str, param: str, code: str = "unsupported_parameter"):
        super().__init__(message)
        self.param, self.code = param, code


class Grammars:
    """Compiles grammars for the tokens of one model. All methods may be called from any thread."""

    def __init__(self, model: ServedModel):
        self._model, self._lock = model, threading.Lock()

    def for_completion(self, body: CompletionRequest) -> Constraint | None:
        """Return the constraint that a request sets for its answers, or None if it sets none. Raises GrammarError."""
        if body.form is None:
            return None
        self._check_support(body.form.param)
        return self._constraint(body, self._form(body.form), body.form.param, (None, None, False))

    def for_chat(self, body: ChatRequest, opening: str) -> Constraint | None:
        """Return the constraint that a request's form or functions set for its answers, or None if they set none.

        `opening` is the end of the prompt that begins the answer.

        Raises GrammarError.
        """
        forced = body.forced_functions
        parallel = not (body.wants_one_call or self._model.format.has_one_call)
        is_text = False
        if body.form is not None or forced:
            param = "tool_choice" if body.form is None else body.form.param
            self._check_support(param)
            structure = self._calls(body, forced or body.functions, parallel)
            if body.form is not None and not forced:
                structure = self._form_or_calls(body.form, structure)
        elif any(function.strict for function in body.functions) and self._can_constrain and self._model.format.trigger:
            param, structure, is_text = "tools", self._optional_calls(body), True
        else:
            return None
        return self._constraint(body, structure, param, self._reasoning(opening), is_text)

    def _constraint(
        self,
        body: GenerationRequest,
        structure: dict[str, Any],
        param: str,
        reasoning: Reasoning,
        is_text: bool = False,
    ) -> Constraint:
        """Return the constraint of a structure, which the field `param` of a request sets. Raises GrammarError."""
        for field in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
            if getattr(body, field):
                message = f"{param}: got it together with {field}, but it decides what follows and ends the answer"
                raise GrammarError(message, param)
        with self._lock:
            compiled = self._compile(structure, param)
        return Constraint(self._model, self.end_finder, *compiled, reasoning, is_text)

    @property
    def _can_constrain(self) -> bool:
        """Whether the program takes masks of tokens, and xgrammar is installed."""
        return self._model.llm.program.takes("allowed_tokens") and find_spec("xgrammar") is not None

    def _check_support(self, param: str) -> None:
        if not self._model.llm.program.takes("allowed_tokens"):
            message = f"{param}: the model {self._model.name!r} was exported without allowed_tokens in its head"
            raise GrammarError(message, param)
        if not self._can_constrain:
            raise GrammarError(f"{param}: needs xgrammar: pip install 'executorch-mlx[grammar]'", param)

    # Structures: the structural tags of xgrammar ------------------------------------------

    def _form_or_calls(self, form: Form, calls: dict[str, Any] | None) -> dict[str, Any]:
        """Return the structure of an answer that has a form or, unless `calls` is None, consists of calls."""
        answer = self._form(form)
        if isinstance(self._model.format, Harmony):
            answer = _sequence([*self._literal("<|channel|>final" + MESSAGE), answer])
        return answer if calls is None else {"type": "or", "elements": [answer, calls]}

    def _calls(self, body: ChatRequest, functions: Sequence[Function], parallel: bool) -> dict[str, Any] | None:
        """Return the structure of one call or, if `parallel`, of one or several. None without functions."""
        if not functions:
            return None
        prefix, separator, suffix = self._model.format.around_calls
        calls = {"type": "or", "elements": [_sequence(self._call(body, function)) for function in functions]}
        several = [calls]
        if parallel and separator is not None:
            several.append({"type": "star", "content": _sequence([*self._literal(separator), calls])})
        return _sequence([*self._literal(prefix), *several, *self._literal(suffix)])

    def _optional_calls(self, body: ChatRequest) -> dict[str, Any]:
        """Return the structure of text that may contain calls, whose arguments then follow the schemas."""
        trigger, tags = self._model.format.trigger, []
        (first,) = self._literal(trigger)
        for function in body.functions:
            begin, end = self._model.format.call_template(function.name)
            *content, last = self._arguments(body, function), *self._literal(end)
            if first["type"] == "token":
                begin, content = first, [*self._literal(begin.removeprefix(trigger)), *content]
            end = last if last["type"] == "token" else last["value"]
            tags.append({"type": "tag", "begin": begin, "content": _sequence(content), "end": end})
        if first["type"] != "token":
            return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}
        others = [*self._model.marker_tokens.keys() - self._model.llm.eos_ids - {first["token"]}]
        ids = {"trigger_tokens": [first["token"]], "exclude_tokens": others}
        return {"type": "token_triggered_tags", "tags": tags, **ids}

    def _call(self, body: ChatRequest, function: Function) -> list[dict[str, Any]]:
        begin, end = self._model.format.call_template(function.name)
        return [*self._literal(begin), self._arguments(body, function), *self._literal(end)]

    def _arguments(self, body: ChatRequest, function: Function) -> dict[str, Any]:
        index = [tool.function for tool in body.tools].index(function)
        return self._json(function.parameters or {"type": "object"}, f"tools.{index}.function.parameters")

    def _form(self, form: Form) -> dict[str, Any]:
        """Return the structure of a text that has a form."""
        if form.kind == "json":
            return self._json(form.value, form.field)
        if (size := sum(map(len, form.value))) > MAX_SCHEMA_CHARACTERS:
            message = f"{form.field}: got {size} characters, expected at most {MAX_SCHEMA_CHARACTERS}"
            raise GrammarError(message, form.field, "invalid_value")
        if form.kind == "choice":
            texts = [{"type": "const_string", "value": text} for text in dict.fromkeys(form.value)]
            return texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}
        try:
            if form.kind == "regex":
                check_pattern(form.value, form.field)
                return {"type": "grammar", "grammar": f"root ::= {rule(form.value, in_json=False)}"}
            return {"type": "grammar", "grammar": checked_grammar(form.value, form.field)}
        except SchemaError as error:
            raise GrammarError(str(error), form.field, "invalid_value") from error

    def _json(self, schema: dict[str, Any], field: str) -> dict[str, Any]:
        import xgrammar

        try:
            text = json.dumps(check_schema(schema), ensure_ascii=False)
            if len(text) > MAX_SCHEMA_CHARACTERS:
                raise SchemaError(f"got {len(text)} characters, expected at most {MAX_SCHEMA_CHARACTERS}")
            grammar = xgrammar.Grammar.from_json_schema(text, any_whitespace=False)
        except SchemaError as error:
            raise GrammarError(f"{field}: {error}", field, "invalid_json_schema") from error
        except RuntimeError as error:
            raise GrammarError(f"{field}: {reason(error)}", field, "invalid_json_schema") from error
        return {"type": "grammar", "grammar": with_rules(repaired(str(grammar)))}

    def _literal(self, text: str) -> list[dict[str, Any]]:
        """Return the elements of a structure for a text. The names of special tokens in it stand for these tokens."""
        elements: list[dict[str, Any]] = []
        while text:
            found = [(text.find(name), id, name) for id, name in self._model.marker_tokens.items() if name in text]
            position, id, name = min(found, default=(len(text), None, ""))
            if position:
                elements.append({"type": "const_string", "value": text[:position]})
            if id is not None:
                elements.append({"type": "token", "token": id})
            text = text[position + len(name) :]
        return elements

    # Compilation ----------------------------------------------------------------------------

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of all tokens. Special tokens have none."""
        llm, special = self._model.llm, self._model.special_tokens
        return [b"" if token in special else llm.token_bytes(token) for token in range(llm.program.vocab_size)]

    @cached_property
    def _compiler(self) -> Any:
        import xgrammar

        llm = self._model.llm
        tokens = [*self.tokens]
        for id in self._model.marker_tokens.keys() - llm.eos_ids:
            tokens[id] = marker_bytes(id)
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=llm.program.vocab_size, stop_token_ids=sorted(llm.eos_ids)
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    @cached_property
    def end_finder(self) -> EndFinder:
        return EndFinder(self.tokens, self._model.llm.eos_ids, self._model.marker_tokens)

    def _compile(self, structure: dict[str, Any], param: str) -> tuple[Any, Any]:
        """Return the compiled grammars of a structure over tokens, and over symbols for `EndFinder`.

        Raises GrammarError if it admits no answer.
        """
        import xgrammar

        try:
            # The compilers have a cache.
            compiled = self._compiler.compile_structural_tag({"type": "structural_tag", "format": structure})
            of_symbols = self.end_finder.compile(structure)
            _fill(xgrammar.GrammarMatcher(compiled), _empty_mask(self._model.llm.program.vocab_size))
            self.end_finder.end(xgrammar.GrammarMatcher(of_symbols), CHECKED_SYMBOLS)
        except (RuntimeError, ValueError) as error:
            code = "invalid_json_schema" if param in ("response_format", "tools", "tool_choice") else "invalid_value"
            raise GrammarError(f"{param}: {reason(error)}", param, code) from error
        return compiled, of_symbols

    def _reasoning(self, opening: str) -> Reasoning:
        """Return the ids of the tokens that open and close reasoning, and whether the prompt opens it.

        The ids are None if the format has no reasoning, or if a tag of it is not one token.
        """
        format = self._model.format
        for section in format.reasoning:
            ids = [self._model.token_id(tag) for tag in (section.open, section.close)]
            if None not in ids:
                return ids[0], ids[1], format.opened(opening) == section
        return None, None, False


class Constraint:
    """A compiled grammar for the answers to one request.

    It does not constrain the reasoning before an answer, but the answer cannot end in it. It brings an answer to its
    end before the limit of its length.

    - `compiled`, `of_symbols`: see `Grammars._compile`.
    - `reasoning`: see `Grammars._reasoning`.
    - `is_text`: see `TokenBudget`.
    """

    def __init__(
        self,
        model: ServedModel,
        end_finder: EndFinder,
        compiled: Any,
        of_symbols: Any,
        reasoning: Reasoning,
        is_text: bool,
    ):
        self._model, self._end_finder, self._reasoning = model, end_finder, reasoning
        self._compiled, self._of_symbols, self._is_text = compiled, of_symbols, is_text
        self._growth = end_finder.growth(of_symbols)

    def allowed_tokens(self, prompt_tokens: int, max_new_tokens: int | None) -> Callable[[Sequence[int]], Any]:
        """Return a function for one answer, for the argument `allowed_tokens` of `LLM.generate`.

        The function returns the mask of the allowed tokens, or None for all. `prompt_tokens` is the length of the
        prompt, and `max_new_tokens` that of the longest answer, or None for no limit beside the context.
        """
        import numpy
        import xgrammar

        program = self._model.llm.program
        room = program.max_context_len - prompt_tokens + 1
        limit = room if max_new_tokens is None else min(room, max_new_tokens)
        next_check = 0  # the length of the answer at which to check again whether its end fits
        open_id, close_id, is_reasoning = self._reasoning
        matcher = xgrammar.GrammarMatcher(self._compiled)
        matcher_of_symbols = xgrammar.GrammarMatcher(self._of_symbols)
        budget = TokenBudget(self._end_finder, matcher_of_symbols, self._is_text, self._growth)
        mask = _empty_mask(program.vocab_size)
        in_reasoning = None if self._is_text else _all_but(self._model.llm.eos_ids, program.vocab_size)
        seen = 0

        def allowed(answer: Sequence[int]) -> Any:
            nonlocal seen, is_reasoning, next_check
            for index in range(seen, len(answer)):
                token = answer[index]
                if is_reasoning:
                    is_reasoning = token != close_id
                elif index == 0 and token == open_id:
                    is_reasoning = True
                elif not matcher.accept_token(token):
                    raise RuntimeError(f"the grammar does not allow token {token} of the answer")
                else:
                    budget.accept(token)
            seen = len(answer)
            if is_reasoning:
                return in_reasoning
            _fill(matcher, mask)
            if len(answer) >= next_check:
                next_check = len(answer) + budget.restrict(mask[0], limit - len(answer))
            if not answer and open_id is not None and next_check:  # the answer may begin with reasoning
                word, bit = divmod(open_id, TOKENS_PER_MASK_WORD)
                mask.view(numpy.uint32)[0, word] |= numpy.uint32(1 << bit)
            return mask

        return allowed


def _empty_mask(vocab_size: int) -> Any:
    import numpy

    return numpy.empty((1, mask_word_count(vocab_size)), dtype=numpy.int32)


def _fill(matcher: Any, mask: Any) -> None:
    """Set the bits of the tokens that the grammar allows next. Raises RuntimeError if this takes long.

    It takes the cube of the number of parts that may be empty and follow each other.
    """
    started = time.thread_time()
    matcher.fill_next_token_bitmask(mask)
    if (seconds := time.thread_time() - started) > MAX_MASK_SECONDS:
        message = f"the mask of a token takes {seconds:.1f} s, expected at most {MAX_MASK_SECONDS:g} s"
        raise RuntimeError(f"{message}; simplify the schema or the grammar")


def _all_but(ids: Collection[int], vocab_size: int) -> Any:
    """Return a mask of all tokens but `ids`."""
    import numpy

    bits = numpy.ones(mask_word_count(vocab_size) * TOKENS_PER_MASK_WORD, dtype=numpy.uint8)
    bits[[*ids]] = 0
    return numpy.packbits(bits, bitorder="little").view(numpy.int32)


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
