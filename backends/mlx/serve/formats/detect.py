"""Detects the format of a model's answers from its chat template and its tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...llm.chat_template import abilities
from .base import REASONING, AnswerFormat, Section
from .cohere import START_ACTION, Cohere
from .deepseek import DeepSeek, DeepSeekV3
from .gemma import Gemma, GemmaTags
from .glm import KEY, Glm
from .harmony import Harmony
from .hermes import Hermes
from .kimi import Kimi
from .lfm2 import Lfm2
from .llama import PYTHON_TAG, Llama
from .mistral import Mistral, MistralNamed
from .tagged import Granite, MiniMax, MiniMaxJson, Phi, Seed

log = logging.getLogger("executorch_mlx.serve")
FORMATS: dict[str, type[AnswerFormat]] = {
    format.name: format
    for format in (
        Hermes,
        Llama,
        Mistral,
        MistralNamed,
        Gemma,
        GemmaTags,
        Harmony,
        Glm,
        DeepSeek,
        DeepSeekV3,
        Lfm2,
        Cohere,
        Kimi,
        MiniMax,
        MiniMaxJson,
        Seed,
        Granite,
        Phi,
    )
}
# The tags of reasoning, by a text that only the chat templates of models with these tags contain.
THINK = {
    "</think>": Section("<think>", "</think>", REASONING),
    "[/THINK]": Section("[THINK]", "[/THINK]", REASONING),
    "<|END_THINKING|>": Section("<|START_THINKING|>", "<|END_THINKING|>", REASONING),
    "</seed:think>": Section("<seed:think>", "</seed:think>", REASONING),
    "Here is my response:": Section("Here is my thought process:", "Here is my response:", REASONING),
    "<channel|>": Section("<|channel>thought", "<channel|>", REASONING),
}


def detect(template: str, has_token: Callable[[str], bool], name: str | None = None) -> AnswerFormat:
    """Return the format of a model.

    - `template`: the source of the chat template, or "".
    - `has_token`: whether a text is one token of the model.
    - `name`: the name of the format, if the caller knows it. Raises KeyError for an unknown name.
    """
    parsed = abilities(template)
    reasoning = [section for text, section in THINK.items() if parsed.has_text(text)]
    name = name or format_name(template, has_token)
    if name is None and "tools" in parsed.variables:
        log.warning("the format of calls in the chat template is unknown: calls are read as in the format hermes")
    format = FORMATS[name or Hermes.name](reasoning)
    format.has_one_call = parsed.has_text(
        "only supports single tool-calls"
    )  # the error of Llama's templates for several
    return format


def format_name(template: str, has_token: Callable[[str], bool]) -> str | None:
    """Return the name of the format, or None if nothing tells."""
    has_text = abilities(template).has_text
    if has_text("<|channel|>") and has_text("<|message|>"):
        return Harmony.name
    if has_text("[TOOL_CALLS]") or has_token("[TOOL_CALLS]"):
        return MistralNamed.name if has_text("[ARGS]") or has_token("[ARGS]") else Mistral.name
    if has_text(DeepSeek.open):
        return DeepSeekV3.name if has_text("```json") else DeepSeek.name
    if has_text("<|tool_call_start|>") or has_text("<|tool_list_start|>"):
        return Lfm2.name
    if has_text(START_ACTION):
        return Cohere.name
    if has_text(KEY):
        return Glm.name
    if has_text("<start_function_call>") or has_text("<|tool_call>"):
        return GemmaTags.name
    for format in (MiniMax, Seed):
        if has_text(format.open):
            return format.name
    if has_text(Kimi.open):
        return Kimi.name
    if has_text("<tool_call>"):
        return Hermes.name
    if has_text(MiniMaxJson.open):
        return MiniMaxJson.name
    if has_text("<|/tool|>"):
        return Phi.name
    if has_text(Granite.open) or has_text("<|start_of_role|>") and has_token(Granite.open):
        return Granite.name
    if has_text("<start_of_turn>"):
        return Gemma.name
    if has_text(PYTHON_TAG) or has_token(PYTHON_TAG):
        return Llama.name
    return None
