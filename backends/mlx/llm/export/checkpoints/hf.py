"""Folders of Hugging Face, and what is the same in the other kinds of folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from ..precision import cast_parameters
from .checkpoint import Checkpoint
from .checks import CHECKPOINT_ERRORS, check_float8, check_loaded, check_quantization, setting
from .head import UnknownHead, load_mtp
from .language_part import config_to_load, language_class, load_config, names_in_language_model
from .tokenizer import load_tokenizer

_MODELOPT = "hf_quant_config.json"  # the settings of a quantization by NVIDIA's Model Optimizer


class HFFolder(Checkpoint):
    """A folder of Hugging Face whose weights transformers reads: floats, or tensors of torchao.

    - `config`: the content of `config.json`.
    - `quantization`: the settings of the quantization, as `quantization_settings` returns them.
    """

    def __init__(self, path: Path, config: dict, quantization: dict):
        super().__init__(path)
        self.config, self.quantization = config, quantization
        self.model_type = config.get("model_type")
        names = config.get("architectures")
        self.architecture = str(names[0]) if isinstance(names, list) and names else "unknown"

    def _load(self, dtype: torch.dtype | None) -> PreTrainedModel:
        whole = load_config(self.path)
        config = config_to_load(whole)
        language = language_class(config, self.path)
        options = {"config": config}
        is_text = config is not whole or config.get_text_config() is config
        if is_text and language is AutoModelForCausalLM:  # also its own folder may have the names of a whole model
            options["key_mapping"] = names_in_language_model(whole, config)
        return self._loaded(language, dtype, options)

    def load_with_pictures(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Return the whole model for pictures or sounds and text, with weights as `load` has them."""
        config = load_config(self.path)
        kind = AutoModelForMultimodalLM
        if type(config) not in kind._model_mapping:  # transformers lists some models that hear elsewhere
            kind = AutoModelForSeq2SeqLM
        model = self._loaded(kind, dtype, {"config": config})
        if dtype is not None:
            cast_parameters(model, dtype)
        return model.eval()

    def _loaded(self, kind: Any, dtype: torch.dtype | None, options: dict[str, Any]) -> PreTrainedModel:
        """Raises ValueError for missing or mismatched tensors, which transformers would initialize at random."""
        self.check()
        where = f"load_causal_lm: {self.path}"
        check_float8(self.path, self.quantization, where)
        try:
            model, info = kind.from_pretrained(
                self.path, dtype=dtype or "auto", output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        except (*CHECKPOINT_ERRORS, ValueError) as error:
            raise ValueError(f"{where}: transformers cannot load the checkpoint: {error}") from error
        check_loaded(model, info, where)
        return model

    def empty_model(self, *, text_only: bool = False) -> PreTrainedModel:
        """Return the model without weights. Its config lacks the quantization.

        With `text_only`, this is the language model of a model for text and other media in any case.
        """
        try:
            config = config_to_load(load_config(self.path), text_only=text_only)
            for part in (config, config.get_text_config()):
                # transformers cannot read mlx-lm's settings, and dequantizes MXFP4.
                for name in ("quantization", "quantization_config"):
                    if hasattr(part, name):
                        delattr(part, name)
            with torch.device("meta"):
                model = language_class(config, self.path).from_config(config)
        except (*CHECKPOINT_ERRORS, OSError, ValueError) as error:
            raise ValueError(f"transformers cannot build a causal language model from this config: {error}") from error
        return model

    def tokenizer(self) -> Any:
        tokenizer = load_tokenizer(self.path)
        if tokenizer is None:
            self.notes.append(f"{self.path} has no tokenizer: prompts and answers of the program are token ids")
        return tokenizer

    def head(self, model: PreTrainedModel) -> MtpModel | None:
        """Return the head, or None. If its layout is unknown, there is a note. Raises ValueError if weights miss."""
        try:
            return load_mtp(model, self.path)
        except UnknownHead as reason:
            self.notes.append(f"left out the head for multi-token prediction: {reason}")
            return None

    def check(self) -> None:
        self.check_transform()
        check_quantization(self.quantization, f"load_causal_lm: {self.path}")

    def check_transform(self) -> None:
        """Raise ValueError for a quantization that multiplies activations by matrices of its own."""
        transform = setting(self.quantization, "transform_config", dict, {})
        if transform.get("config_groups"):
            raise ValueError(f"load_causal_lm: {self.path}: transform_config: got {transform}, expected none")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of all files, memory-mapped, by their names in the files.

        Raises ValueError if there are none.
        """
        tensors = {}
        for path in sorted(self.path.glob("model*.safetensors")):
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}
        if not tensors:
            raise ValueError(f"load_causal_lm: {self.path}: expected files model*.safetensors with the tensors")
        return tensors


def quantization_settings(folder: Path, config: dict) -> dict:
    """Return the settings of the quantization, or an empty dict. Their key `quant_method` names the kind.

    `config` is the content of `config.json`. Raises ValueError if they are no object.
    """
    # Configs for text and other media have the settings outside or in the part for text.
    for part in (config, object_in(config, "text_config")):
        if settings := object_in(part, "quantization_config"):
            return settings
    if (folder / _MODELOPT).is_file():
        return {"quant_method": "modelopt"} | object_in(read_json(folder / _MODELOPT), "quantization")
    return {}


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raises ValueError if the file has another content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {str(content)[:80]}, expected a JSON object")
    return content


def object_in(config: dict, name: str) -> dict:
    """Return the object `name` in a config, or an empty dict if there is none. Raises ValueError for other values."""
    part = config.get(name) or {}
    if not isinstance(part, dict):
        raise ValueError(f"{name}: got {str(part)[:80]}, expected an object")
    return part
