"""Renders and parses chat templates, which are Jinja programs from a model's author, in a sandbox."""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .errors import FieldError
from .vision.messages import as_parts, as_text

# The variables that every template gets. It also gets the special tokens and the options of the caller.
VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Added to a message, it shows where the template writes the content: no template has this character for private use.
MARK = "\uf8ff"
# The exceptions that a template can raise: by itself, or by an operation on values of wrong types.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
) -> str:
    """Return the text of a chat, up to the beginning of the answer if `add_generation_prompt`.

    `variables` are further variables of the template: the special tokens, and what the caller adds. As in transformers,
    fields of messages that are None are left out, because many templates would write them as text.

    Raises ValueError if the template is invalid or rejects the messages, or if a message or a variable has no JSON
    form.
    """
    try:
        # The sandbox cannot know which methods of an arbitrary object are harmless. Templates get JSON values only.
        messages, variables = json.loads(json.dumps([list(messages), dict(variables)]))
    except (TypeError, ValueError) as error:
        raise FieldError("messages", problem=f"expected JSON values: {error}") from error
    for message in messages:
        if not isinstance(message, dict):
            raise FieldError("messages", repr(message), "a mapping with role and content")
    messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
    takes_texts, takes_parts = _takes(template)
    if takes_texts and not takes_parts:
        messages = [as_text(message) for message in messages]
    else:
        messages = [as_parts(message, always=not takes_texts and takes_parts) for message in messages]
    chat = {
        "tools": None,
        "documents": None,
        **variables,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compile(template).render(chat)
    except _TEMPLATE_ERRORS as error:
        raise FieldError("messages", problem=f"the chat template rejected them: {error}") from error


def render_unfinished(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Return the text of a chat up to the end of the last message's content, so that the answer continues this message.

    Space at the end of the content is part of the text if the template keeps it.

    Raises ValueError as `render`, if the last message is not only text, and if the template leaves this text out.
    """
    last = messages[-1] if messages else {}
    content = last.get("content")
    if not isinstance(content, str) or last.get("tool_calls"):
        raise FieldError("messages", problem="only a last message with text and without tool_calls can be continued")

    def text(content: str) -> str:
        continued = [*messages[:-1], {**last, "content": content}]
        return render(template, continued, variables, add_generation_prompt=False)

    own, longer = text(content), text(content + MARK)
    if own == longer:
        raise FieldError("messages", problem="the chat template leaves out the content of the last message")
    return os.path.commonprefix([own, longer])


@dataclass(frozen=True)
class Abilities:
    """What a chat template takes and writes.

    - `variables`: the names of the variables that it takes, such as `tools`.
    - `fields`: the names of the fields that it reads, such as `thinking` of messages.
    - `texts`: the texts that it writes, or compares with values.
    """

    variables: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()
    texts: tuple[str, ...] = ()

    def has_text(self, part: str) -> bool:
        """Whether `part` is in one of the texts."""
        return any(part in text for text in self.texts)


@cache
def abilities(template: str) -> Abilities:
    """Parse a chat template. One that is invalid has no abilities."""
    try:
        tree = _environment().parse(template)
        variables = frozenset(meta.find_undeclared_variables(tree))
    except TemplateError:
        return Abilities()
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    fields = {node.attr for node in tree.find_all(nodes.Getattr)}
    fields |= {node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    return Abilities(variables, frozenset(map(str, fields)), tuple(texts))


def check(template: str) -> None:
    """Raise ValueError if a chat template is invalid."""
    try:
        _compile(template)
    except TemplateError as error:
        raise ValueError(f"chat_template: {error}") from error


@cache
def _takes(template: str) -> tuple[bool, bool]:
    """Whether a template shows a text that is a content, and one that is a part of a content.

    Those of some models for pictures show only parts, and others show only texts, such as that of Phi-4 multimodal.
    """
    text = "<0>"

    def shows(content: Any) -> bool:
        message = {"role": "user", "content": content}
        chat = {"messages": [message], "add_generation_prompt": True, "bos_token": "", "eos_token": ""}
        try:
            return text in _compile(template).render(chat)
        except _TEMPLATE_ERRORS:
            return False

    return shows(text), shows([{"type": "text", "text": text}])


@cache
def _compile(template: str):
    return _environment().from_string(template)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that Hugging Face documents for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals |= {"namespace": _PublicNamespace, "dict": lambda *pairs, **named: dict(*pairs, **named)}
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return `value` as JSON. Jinja's own filter `tojson` would escape the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _PublicNamespace(Namespace):
    """Jinja's `namespace()`, without names that begin with an underscore: they could reach Python's own attributes."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *pairs = args
        initial = dict(*pairs, **values)
        for name in initial:
            _check_public(name)
        Namespace.__init__(self, initial)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"namespace: got the name {name!r}, expected a name that does not begin with an underscore")


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks the answers in training data. Here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
