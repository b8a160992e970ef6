"""Detects the format of a model's answers from its chat template and its tokens."""

from __future__ import annotations

from collections.abc import Callable

from .base import REASONING, AnswerFormat, Section
from .gemma import Gemma, GemmaTags
from .harmony import Harmony
from .hermes import Hermes
from .llama import PYTHON_TAG, Llama
from .mistral import Mistral, MistralNamed

FORMATS: dict[str, type[AnswerFormat]] = {
    format.name: format for format in (Hermes, Llama, Mistral, MistralNamed, Gemma, GemmaTags, Harmony)
}
# The tags of reasoning, by a text that only the chat templates of models with these tags contain.
THINK = {
    "</think>": Section("<think>", "</think>", REASONING),
    "[/THINK]": Section("[THINK]", "[/THINK]", REASONING),
    "<channel|>": Section("<|channel>thought", "<channel|>", REASONING),
}


def detect(template: str, has_token: Callable[[str], bool], name: str | None = None) -> AnswerFormat:
    """Return the format of a model.

    - `template`: the source of the chat template, or "".
    - `has_token`: whether a text is one token of the model.
    - `name`: the name of the format, if the caller knows it. Raises KeyError for an unknown name.
    """
    reasoning = [section for text, section in THINK.items() if text in template]
    return FORMATS[name or _name(template, has_token)](reasoning)


def _name(template: str, has_token: Callable[[str], bool]) -> str:
    if "<|channel|>" in template and "<|message|>" in template:
        return Harmony.name
    if "[TOOL_CALLS]" in template or has_token("[TOOL_CALLS]"):
        return MistralNamed.name if "[ARGS]" in template or has_token("[ARGS]") else Mistral.name
    if "<start_function_call>" in template or "<|tool_call>" in template:
        return GemmaTags.name
    if "<tool_call>" in template:
        return Hermes.name
    if "<start_of_turn>" in template:
        return Gemma.name
    if PYTHON_TAG in template or has_token(PYTHON_TAG):
        return Llama.name
    return Hermes.name
