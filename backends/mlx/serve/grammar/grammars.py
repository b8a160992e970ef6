"""Grammars for answers: JSON that follows a schema, and calls of functions. llguidance computes the masks of tokens.

The mask is an input of the program, which draws one of the allowed tokens; see `allowed_tokens` of `LLM.generate`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from ...llm.errors import FieldError
from ...llm.sampling_parameters import TOKENS_PER_MASK_WORD, mask_word_count
from ..formats import AnswerFormat
from ..formats.harmony import MESSAGE, Harmony
from .json_schema import SchemaError, adapted
from .lark import MAX_CHARACTERS, LarkGrammar, from_client, one_of
from .quoted import quoted

if TYPE_CHECKING:
    from ...llm import LLM
    from ..chat_request import ChatRequest, Function, Grammar
    from ..forms import Form
    from ..request import CompletionRequest, GenerationRequest

# The ids of the tokens that open and close reasoning, and whether the prompt opens it; see `Grammars._reasoning`.
Reasoning = tuple[int | None, int | None, bool]
INPUT_BEGIN, INPUT_END = '{"input": "', '"}'  # around the text of a call of a custom tool
# Keywords that say which properties an object has beside its `properties`.
MORE_PROPERTIES = {"additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"}
MORE_PROPERTIES |= {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "minProperties"}
TEXT = r"/(.|\n)*/"
# llguidance compiles by recursion: a chain of rules in a text of MAX_CHARACTERS needs less than this.
STACK_BYTES = 256 * 2**20
MAX_ERROR_CHARACTERS = 400
_compiling = threading.Lock()  # the size of the stacks of new threads is the same for all threads


class GrammarError(FieldError):
    """Raised for a request whose grammar this server cannot follow. `name` is the field of the request."""

    def __init__(self, name: str, problem: str, code: str = "unsupported_parameter"):
        super().__init__(name, problem=problem)
        self.code = code


class Model(Protocol):
    """What grammars use of a model; see `ServedModel`."""

    llm: LLM
    name: str
    format: AnswerFormat

    @property
    def special_tokens(self) -> Mapping[int, str]: ...

    @property
    def marker_tokens(self) -> Mapping[int, str]: ...

    def token_id(self, text: str) -> int | None: ...

    def token_bytes(self, token: int) -> bytes: ...


class Grammars:
    """Compiles grammars for the tokens of one model. All methods may be called from any thread."""

    def __init__(self, model: Model):
        self._model = model

    def for_completion(self, body: CompletionRequest) -> Constraint | None:
        """Return the constraint that a request sets for its answers, or None if it sets none. Raises GrammarError."""
        if body.form is None:
            return None
        self._check_support(body.form.param)
        return self._constraint(body, [_form(self._grammar(), body.form)], body.form.param, (None, None, False))

    def for_chat(self, body: ChatRequest, opening: str) -> Constraint | None:
        """Return the constraint that a request's form or functions set for its answers, or None if they set none.

        `opening` is the end of the prompt that begins the answer.

        Raises GrammarError.
        """
        forced, reasoning = body.forced_functions, self._reasoning(opening)
        if body.form is not None or forced:
            param = "tool_choice" if body.form is None else body.form.param
            self._check_support(param)
            answers = [self._calls(body, functions)] if (functions := forced or body.functions) else []
            if body.form is not None and not forced:
                answers.append(self._form_answer(body.form))
            return self._constraint(body, answers, param, reasoning)
        if any(function.strict for function in body.functions) and self._model.format.trigger and not self.obstacle:
            return self._constraint(body, [self._optional_calls(body)], "tools", reasoning, is_text=True)
        return None

    def _constraint(
        self,
        body: GenerationRequest,
        answers: Sequence[LarkGrammar],
        param: str,
        reasoning: Reasoning,
        is_text: bool = False,
    ) -> Constraint:
        """Return the constraint to one of several grammars, which the field `param` of a request sets.

        Raises GrammarError.
        """
        for field in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
            if getattr(body, field):
                problem = f"got it together with {field}, but it decides what follows and ends the answer"
                raise GrammarError(param, problem)
        matchers = [self._compile(grammar, param) for grammar in answers]
        return Constraint(self._model, matchers, reasoning, is_text)

    def _grammar(self) -> LarkGrammar:
        return LarkGrammar(self._model.marker_tokens)

    @property
    def obstacle(self) -> str:
        """Why answers of this model cannot follow a grammar, or ""."""
        if not self._model.llm.program.takes("allowed_tokens"):
            return (
                f"the model {self._model.name!r} was exported without allowed_tokens in its head; export it with "
                "--allowed-tokens"
            )
        if not self._model.llm.eos_ids:
            return f"the model {self._model.name!r} has no stop id, with which such an answer ends"
        return "" if find_spec("llguidance") else "needs llguidance: pip install 'executorch-mlx[serve]'"

    def _check_support(self, param: str) -> None:
        if obstacle := self.obstacle:
            raise GrammarError(param, obstacle)

    # Grammars of answers and calls ----------------------------------------------------------

    def _form_answer(self, form: Form) -> LarkGrammar:
        """Return the grammar of an answer in a chat that has a form."""
        before = "<|channel|>final" + MESSAGE if isinstance(self._model.format, Harmony) else ""
        return _form(self._grammar(), form, before)

    def _calls(self, body: ChatRequest, functions: Sequence[Function]) -> LarkGrammar:
        """Return the grammar of one call or, if the request and the format permit it, of one or several."""
        grammar = self._grammar()
        prefix, separator, suffix = self._model.format.around_calls
        call = grammar.rule(one_of(self._call(grammar, body, function) for function in functions))
        has_one = body.wants_one_call or self._model.format.has_one_call or separator is None
        others = "" if has_one else f"({grammar.literal(separator)} {call})*"
        grammar.start = f"{grammar.literal(prefix)} {call} {others} {grammar.literal(suffix)}"
        return grammar

    def _optional_calls(self, body: ChatRequest) -> LarkGrammar:
        """Return the grammar of text that may contain calls, whose arguments then follow the schemas."""
        grammar, trigger = self._grammar(), self._model.format.trigger
        calls = one_of(self._call(grammar, body, function, trigger) for function in body.functions)
        text = grammar.rule(TEXT, name="TEXT")
        if trigger in self._model.marker_tokens.values():  # a token, which no text contains
            begin = f"{text} {grammar.literal(trigger)}"
        else:
            begin = grammar.rule(rf"/(.|\n)*{re.escape(trigger).replace('/', '[/]')}/", name="begin[lazy]")
        grammar.start = f"({begin} {calls})* {text}"
        return grammar

    def _call(self, grammar: LarkGrammar, body: ChatRequest, function: Function, trigger: str = "") -> str:
        """Return the expression of a call without the text `trigger` at its beginning."""
        begin, end = self._model.format.call_template(function.name)
        index = [tool.function for tool in body.tools].index(function)
        if given := body.tools[index].grammar:
            field = f"tools.{index}.custom.format.grammar.definition"
            begin, end = begin + INPUT_BEGIN, INPUT_END + end
            arguments = _quoted(grammar, given, field)
        else:
            arguments = _json(grammar, arguments_of(function), f"tools.{index}.function.parameters")
        return f"{grammar.literal(begin.removeprefix(trigger))} {arguments} {grammar.literal(end)}"

    # Compilation ----------------------------------------------------------------------------

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokens of the model, for llguidance. Special tokens are not part of any text."""
        from llguidance import LLTokenizer

        llm, special = self._model.llm, self._model.special_tokens
        tokens = SimpleNamespace(
            is_tokenizer_wrapper=True,
            tokens=[self._model.token_bytes(id) for id in range(llm.program.vocab_size)],
            special_token_ids=sorted({*special, *llm.eos_ids}),
            eos_token_id=min(llm.eos_ids),
            bos_token_id=None,
        )
        return LLTokenizer(tokens, eos_token=sorted(llm.eos_ids))

    def _compile(self, grammar: LarkGrammar, param: str) -> Any:
        """Return a matcher at the beginning of an answer. Raises GrammarError if the grammar admits no answer."""
        matcher = self._matcher(grammar.text())
        if not (error := _error(matcher)):
            return matcher
        for field, text in grammar.texts_of_parts():
            if own_error := _error(self._matcher(text)):
                param, error = field, own_error
                break
        is_schema = not param.startswith(("structured_outputs", "guided")) and not param.endswith(".definition")
        code = "invalid_json_schema" if is_schema else "invalid_value"
        raise GrammarError(param, error, code)

    def _matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        with _compiling:
            tokenizer, limits = self._tokenizer, LLParserLimits(verbose_errors=False)
            return _with_large_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits))

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
    """Compiled grammars for the answers to one request. Each answer follows one of them.

    They do not constrain the reasoning before an answer, but the answer cannot end in it.

    - `matchers`: those of llguidance, at the beginning of an answer. They are separate, because a matcher commits
      itself to the longest literal that a text may begin with: one for calls and other answers would exclude answers.
    - `reasoning`: see `Grammars._reasoning`.
    - `is_text`: the answer is text that may contain calls. It may end in its reasoning.
    """

    def __init__(self, model: Model, matchers: Sequence[Any], reasoning: Reasoning, is_text: bool):
        self._model, self._matchers, self._reasoning, self._is_text = model, matchers, reasoning, is_text

    def allowed_tokens(self) -> Callable[[Sequence[int]], Any]:
        """Return a function for one answer, for the argument `allowed_tokens` of `LLM.generate`.

        The function returns the mask of the allowed tokens, or None for all.
        """
        import numpy

        vocab_size, eos_ids = self._model.llm.program.vocab_size, self._model.llm.eos_ids
        open_id, close_id, is_reasoning = self._reasoning
        matchers = [matcher.deep_copy() for matcher in self._matchers]
        mask = numpy.empty(mask_word_count(vocab_size), dtype=numpy.int32)
        in_reasoning = None if self._is_text else _all_but(eos_ids, vocab_size)
        seen = 0

        def allowed(answer: Sequence[int]) -> Any:
            nonlocal seen, is_reasoning, matchers
            for index in range(seen, len(answer)):
                token = answer[index]
                if is_reasoning:
                    is_reasoning = token != close_id
                elif index == 0 and token == open_id:
                    is_reasoning = True
                else:
                    matchers = [matcher for matcher in matchers if matcher.consume_token(token)]
                    if not matchers:
                        raise RuntimeError(f"the grammar does not allow token {token} of the answer")
            seen = len(answer)
            if is_reasoning:
                return in_reasoning
            _fill(matchers[0], mask)
            for matcher in matchers[1:]:
                other = numpy.empty_like(mask)
                _fill(matcher, other)
                numpy.bitwise_or(mask, other, out=mask)
            if not answer and open_id is not None:  # the answer may begin with reasoning
                word, bit = divmod(open_id, TOKENS_PER_MASK_WORD)
                mask.view(numpy.uint32)[word] |= numpy.uint32(1 << bit)
            return mask

        return allowed


def _fill(matcher: Any, mask: Any) -> None:
    """Set the bits of the tokens that may come next. Raises RuntimeError if the grammar is too complex for a mask."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if error := matcher.get_error():
        raise RuntimeError(f"the mask of a token: {error}")


def _form(grammar: LarkGrammar, form: Form, before: str = "") -> LarkGrammar:
    """Give a grammar the start of a text that has a form, with a text before it. Raises GrammarError."""
    grammar.start = f"{grammar.literal(before)} {_expression(grammar, form)}"
    return grammar


def _expression(grammar: LarkGrammar, form: Form) -> str:
    """Return the expression of a text that has a form. Raises GrammarError."""
    if form.kind == "json":
        return _json(grammar, form.value, form.field)
    if (size := sum(map(len, form.value))) > MAX_CHARACTERS:
        raise GrammarError(form.field, f"got {size} characters, expected at most {MAX_CHARACTERS}", "invalid_value")
    if form.kind == "choice":
        return one_of(map(LarkGrammar({}).literal, form.value))
    if form.kind == "regex":
        return grammar.regex(form.value, form.field)
    try:
        return grammar.lark(from_client(form.value), form.field)
    except ValueError as error:
        problem = f'{error}, expected GBNF, such as root ::= "yes" | "no", or Lark'
        raise GrammarError(form.field, problem, "invalid_value") from error


def arguments_of(function: Function) -> dict[str, Any]:
    """Return the schema of the arguments that a function takes: those that it declares, unless it says that others may
    follow. A small model would otherwise invent one after the other.
    """
    schema = function.parameters or {"type": "object"}
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not schema.keys().isdisjoint(MORE_PROPERTIES):
        return schema
    if not isinstance(required, list) or any(name not in [*properties] for name in required):
        return schema
    return schema | {"additionalProperties": False}


def _quoted(grammar: LarkGrammar, given: Grammar, field: str) -> str:
    """Return the expression of a text that follows a grammar, as it is between quotes in JSON. Raises GrammarError."""
    from llguidance import regex_to_lark

    if (size := len(given.definition)) > MAX_CHARACTERS:
        raise GrammarError(field, f"got {size} characters, expected at most {MAX_CHARACTERS}", "invalid_value")
    is_lark = given.syntax == "lark"
    try:
        text = quoted(given.definition if is_lark else f"start: /{regex_to_lark(given.definition, 'dws')}/")
    except ValueError as error:
        raise GrammarError(field, str(error), "invalid_value") from error
    return grammar.lark(text, field)


def _json(grammar: LarkGrammar, schema: dict[str, Any], field: str) -> str:
    """Return the expression of JSON that follows a schema. Raises GrammarError."""
    try:
        if (size := len(json.dumps(schema, ensure_ascii=False))) > MAX_CHARACTERS:
            raise SchemaError(f"got {size} characters, expected at most {MAX_CHARACTERS}")
        return grammar.json(adapted(schema), field)
    except SchemaError as error:
        raise GrammarError(field, str(error), "invalid_json_schema") from error


def _error(matcher: Any) -> str:
    """Return why a matcher at the beginning of an answer admits none, or "" if it admits one."""
    matcher.compute_bitmask()
    error = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())  # it shows the place in several lines
    if matcher.is_stopped() and not matcher.is_accepting() and error in ("", "NoExtension", "NoExtensionBias"):
        return "the grammar admits no answer"
    return error[:MAX_ERROR_CHARACTERS]


def _with_large_stack(function: Callable[[], Any]) -> Any:
    """Return the result of a function that does not raise. It runs on a thread with a stack of STACK_BYTES."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), name="grammar")
    before = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return results[0]


def _all_but(ids: Collection[int], vocab_size: int) -> Any:
    """Return a mask of all tokens but `ids`."""
    import numpy

    bits = numpy.ones(mask_word_count(vocab_size) * TOKENS_PER_MASK_WORD, dtype=numpy.uint8)
    bits[[*ids]] = 0
    return numpy.packbits(bits, bitorder="little").view(numpy.int32)
