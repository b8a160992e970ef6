"""Detects the format of a model's answers from its chat template and its tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .base import REASONING, AnswerFormat, Section
from .cohere import START_ACTION, Cohere
from .deepseek import START, DeepSeek, DeepSeekV3
from .gemma import Gemma, GemmaTags
from .glm import KEY, Glm
from .harmony import Harmony
from .hermes import Hermes
from .lfm2 import Lfm2
from .llama import PYTHON_TAG, Llama
from .mistral import Mistral, MistralNamed

log = logging.getLogger("executorch_mlx.serve")
FORMATS: dict[str, type[AnswerFormat]] = {
    format.name: format
    for format in (
        Hermes, Llama, Mistral, MistralNamed, Gemma, GemmaTags, Harmony, Glm, DeepSeek, DeepSeekV3, Lfm2, Cohere
    )  # fmt: skip
}
# The tags of reasoning, by a text that only the chat templates of models with these tags contain.
THINK = {
    "</think>": Section("<think>", "</think>", REASONING),
    "[/THINK]": Section("[THINK]", "[/THINK]", REASONING),
    "<|END_THINKING|>": Section("<|START_THINKING|>", "<|END_THINKING|>", REASONING),
    "<channel|>": Section("<|channel>thought", "<channel|>", REASONING),
}


def detect(template: str, has_token: Callable[[str], bool], name: str | None = None) -> AnswerFormat:
    """Return the format of a model.

    - `template`: the source of the chat template, or "".
    - `has_token`: whether a text is one token of the model.
    - `name`: the name of the format, if the caller knows it. Raises KeyError for an unknown name.
    """
    reasoning = [section for text, section in THINK.items() if text in template]
    name = name or format_name(template, has_token)
    if name is None and "tools" in template:
        log.warning("the format of calls in the chat template is unknown: calls are read as in the format hermes")
    format = FORMATS[name or Hermes.name](reasoning)
    format.has_one_call = "only supports single tool-calls" in template  # the error of Llama's templates for several
    return format


def format_name(template: str, has_token: Callable[[str], bool]) -> str | None:
    """Return the name of the format, or None if nothing tells."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Harmony.name
    if "[TOOL_CALLS]" in template or has_token("[TOOL_CALLS]"):
        return MistralNamed.name if "[ARGS]" in template or has_token("[ARGS]") else Mistral.name
    if START in template:
        return DeepSeekV3.name if "```json" in template else DeepSeek.name
    if "<|tool_call_start|>" in template or "<|tool_list_start|>" in template:
        return Lfm2.name
    if START_ACTION in template:
        return Cohere.name
    if KEY in template:
        return Glm.name
    if "<start_function_call>" in template or "<|tool_call>" in template:
        return GemmaTags.name
    if "<tool_call>" in template:
        return Hermes.name
    if "<start_of_turn>" in template:
        return Gemma.name
    if PYTHON_TAG in template or has_token(PYTHON_TAG):
        return Llama.name
    return None
