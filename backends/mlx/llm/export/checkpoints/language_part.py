"""The language model in a model for text and other media: its config, its class and its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .checks import CHECKPOINT_ERRORS

# A pattern in the name of a tensor of a model for text and images → its replacement in the language model alone.
LANGUAGE_MODEL_NAMES = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
# For language models inside models for images and text: the kind → the settings that differ in the causal language
# model that computes the same for text. The positions of a text are the same on all axes of the rotary embedding.
_TWINS = {
    "glm4v_moe_text": {"model_type": "glm4_moe"},
    "glm4v_text": {"model_type": "glm4"},
    "glm_ocr_text": {"model_type": "glm4", "attention_bias": False},
    "hunyuan_vl_text": {"model_type": "hunyuan_v1_dense"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_vl_text": {"model_type": "qwen3"},
}


def load_config(folder: Path) -> PretrainedConfig:
    """Return the config of the checkpoint in `folder` as transformers reads it, without settings of a run.

    Checkpoints may name an implementation of attention that is not installed, such as flash_attention_2, and may ask
    for results that are tuples. Code in the folder is not run. Raises ValueError if transformers cannot read the
    config.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except CHECKPOINT_ERRORS as error:
        raise ValueError(f"load_causal_lm: {folder}: transformers cannot read config.json: {error}") from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{folder}: the code of the model is a part of the checkpoint, and is not run; expected a model of "
                "transformers"
            ) from error
        raise
    config._attn_implementation = None
    config.return_dict = True
    return config


def _language_config(config: PretrainedConfig, *, always: bool = False) -> PretrainedConfig:
    """Return the config of the language model of a model for text and other media, or `config` itself.

    This is `config` if transformers has a causal language model for it that leaves out the other media, or has none for
    the config of the language model. With `always`, it is the config of the language model in any case.
    `language_class` tells which class of model the result stands for. Of a model that also speaks, such as
    Qwen2.5-Omni, `config` stands for the part that writes.
    """
    config = _writer(config)
    text = _text_config(config)
    if text is config or not always and (_is_language_only(config) or not _is_causal(text)):
        return config
    # Checkpoints have the first of these settings in one of the two configs, and the second one in the outer config.
    text.tie_word_embeddings = is_tied(text) or is_tied(config)
    if hasattr(config, "quantization_config"):
        text.quantization_config = config.quantization_config
    return text


def _writer(config: PretrainedConfig) -> PretrainedConfig:
    return getattr(config, "thinker_config", config)


def is_tied(config: PretrainedConfig) -> bool:
    return getattr(config, "tie_word_embeddings", False)  # some outer configs lack the setting


def _text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model, if possible as that of a causal language model of transformers."""
    text = config.get_text_config()
    twin = _TWINS.get(text.model_type)
    if twin is None:
        return text
    result = AutoConfig.for_model(**text.to_dict() | twin)
    result.rope_parameters = text.rope_parameters  # without the defaults of the other kind
    return result


def _is_causal(config: PretrainedConfig) -> bool:
    return type(config) in AutoModelForCausalLM._model_mapping


def _is_language_only(config: PretrainedConfig) -> bool:
    """Whether the causal language model for `config`, unlike ForConditionalGeneration, has no parts for other media."""
    return _is_causal(config) and AutoModelForCausalLM._model_mapping[type(config)].__name__.endswith("ForCausalLM")


def config_to_load(config: PretrainedConfig, *, text_only: bool = False) -> PretrainedConfig:
    """Return the config of the model that is loaded from a checkpoint of `config`: that of its language model, or all.

    It is `config` if transformers converts the tensors only in the whole model. A language model of another family has
    conversions of its own. With `text_only`, the checkpoint has the tensors of the language model only.
    """
    config = _writer(config)
    text = _language_config(config, always=text_only)
    conversions, of_text = (get_checkpoint_conversion_mapping(c.model_type) or () for c in (config, text))
    is_converted = any(isinstance(conversion, WeightConverter) for conversion in conversions)
    is_whole = is_converted and not of_text and type(text).__module__ == type(config).__module__
    return config if is_whole and not text_only else text


def names_in_language_model(whole: PretrainedConfig, config: PretrainedConfig) -> dict[str, str]:
    """Return a mapping from patterns in the names of tensors to replacements, as transformers takes it.

    It is for a checkpoint of `whole`, of which the model of `config` is a part. transformers renames some tensors of
    `whole` first.
    """
    conversions = () if config is whole else get_checkpoint_conversion_mapping(whole.model_type) or ()
    renamings = {
        source: conversion.target_patterns[0]
        for conversion in conversions
        if type(conversion) is WeightRenaming
        for source in conversion.source_patterns
    }
    return renamings | LANGUAGE_MODEL_NAMES


def language_class(config: PretrainedConfig, folder: Path) -> Any:
    """Return the class of transformers that builds a language model for `config`. Raises ValueError if there is none.

    If transformers has no causal language model for `config`, the class builds a model for text and other media, of
    which `remove_other_media` leaves the language model. There is no class for an encoder with a decoder: transformers
    would build a decoder alone, for which the weights were not trained.
    """
    if not config.is_encoder_decoder:
        if _is_causal(config):
            return AutoModelForCausalLM
        if type(config) in AutoModelForMultimodalLM._model_mapping:
            return AutoModelForMultimodalLM
    kind = "an encoder with a decoder" if config.is_encoder_decoder else "a model"
    raise ValueError(
        f"load_causal_lm: {folder}: got {kind} of kind {config.model_type}, expected one for which transformers has a "
        "causal language model"
    )


def remove_other_media(model: PreTrainedModel) -> None:
    """Remove from a model for text and other media all but its decoder, embedding and output projection, in place.

    A causal language model stays as it is, except for other media within its decoder.
    """
    is_causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    _remove(_media_in_decoder(model) if is_causal else other_media(model), model)


class _NoMedia(torch.nn.Module):
    """Stands for a module within a decoder that puts other media into the embeddings of a text."""

    def forward(self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor, **media: Any) -> torch.Tensor:
        return inputs_embeds


def _remove(media: list[tuple[torch.nn.Module, str, torch.nn.Module]], model: PreTrainedModel) -> None:
    for parent, name, _ in media:
        setattr(parent, name, _NoMedia() if parent is model.get_decoder() else None)


def without_other_media(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model of a model for text and other media, with the same weights.

    It is a causal language model, if transformers has one around the decoder. Otherwise, it is `model` without the
    other media, which is changed in place.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    text = model.config.get_text_config()
    if head is not None and _is_language_only(text):
        kind = AutoModelForCausalLM._model_mapping[type(text)]
        if (part := next((module for module in model.modules() if type(module) is kind), None)) is not None:
            part.generation_config = model.generation_config
            _remove(_media_in_decoder(part), part)
            return part
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(text)
        if type(causal.base_model) is type(decoder):
            setattr(causal, causal.base_model_prefix, decoder)
            causal.set_output_embeddings(head)
            causal.generation_config = model.generation_config
            return causal.eval()
    _remove(other_media(model), model)
    return model


def other_media(model: PreTrainedModel) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Return the modules for other media than text, each behind its parent and its name there."""
    parts = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}
    return [] if None in parts else [*_all_but(parts, model), *_media_in_decoder(model)]


def _media_in_decoder(model: PreTrainedModel) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Return the modules of the decoder that contain a model of their own, as `other_media` does."""
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()
    if decoder is None:
        return []
    return [
        (decoder, name, child)
        for name, child in decoder.named_children()
        if any(isinstance(part, PreTrainedModel) for part in child.modules()) and embedding not in child.modules()
    ]


def _all_but(
    parts: set[torch.nn.Module], parent: torch.nn.Module
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Yield what is neither in one of the parts nor contains one: the parent, the name and the module."""
    for name, child in list(parent.named_children()):
        if parts.isdisjoint(child.modules()):
            yield parent, name, child
        elif child not in parts:
            yield from _all_but(parts, child)


def language_tensors(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], kind: str | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of the language model `model` by their names in it.

    `tensors` may be those of a whole model for text and other media, of which `model` is a part. `kind` is the kind of
    the model in the checkpoint, if it is known.
    """
    part, is_named_in_whole = {}, re.compile("|".join(LANGUAGE_MODEL_NAMES)).search
    names = model.state_dict()
    if any(map(is_named_in_whole, names)):
        return tensors
    if not any(map(is_named_in_whole, tensors)):
        if kind in (None, model.config.model_type):
            return tensors
        own = {name.partition(".")[0] for name in names}  # only the other media have names of their own
        return {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] in own}
    for name, tensor in tensors.items():
        if name.startswith("lm_head.") or is_named_in_whole(name):
            for pattern, replacement in LANGUAGE_MODEL_NAMES.items():
                name = re.sub(pattern, replacement, name)
            part[name] = tensor
    return part
