"""The head for multi-token prediction of a Hugging Face checkpoint, which guesses the token after the next one."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from ..attention.observe import STATE_KINDS
from .checks import shortened


class UnknownHead(Exception):
    """A checkpoint has a head for multi-token prediction, but its layout is unknown. The message says why."""


# The tensors of a head in the layout of Qwen3-Next and Qwen3.5, besides those of its layers.
_QWEN_TENSORS = {f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")  # the ends of names of tensors
# The names under which the configs of such checkpoints store the number of layers of the head. Some have none of them.
_QWEN_NUM_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def load_mtp(model: PreTrainedModel, folder: Path) -> MtpModel | None:
    """Return the first layer of the head in the Hugging Face checkpoint `folder` of `model`, or None without a head.

    Embeddings and output projection are those of `model`. Raises ValueError if weights of the layer are missing, and
    `UnknownHead` if the layout of the head is unknown.
    """
    config = model.config.get_text_config()
    with ExitStack() as stack:
        weights = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, "pt"))
            weights |= {key: file.get_slice(key) for key in file.keys() if _is_of_head(key, config.num_hidden_layers)}
        if not weights:
            return None
        if quantized := [key for key in weights if key.endswith(_QUANTIZED)]:
            raise UnknownHead(f"its weights are quantized, such as {min(quantized)}")
        if getattr(config, "num_mtp_layers", None):
            head = _build(model)
        elif weights.keys() >= _QWEN_TENSORS:
            head = _build_qwen(model)
        elif any(key.startswith("mtp.") for key in weights):
            raise UnknownHead(f"the names of its tensors are unknown, such as {min(weights)}")
        else:
            return None
        conversions = head.get_weight_conversions(model)
        info, _ = convert_and_load_state_dict_in_model(
            model=head,
            state_dict=weights,
            load_config=LoadStateDictConfig(weight_mapping=conversions, dtype=model.config.dtype),
        )
        head._adjust_missing_and_unexpected_keys(info)
    if info.missing_keys:
        raise ValueError(f"{folder}: missing tensors for the multi-token prediction: {shortened(info.missing_keys)}")
    return head.eval().requires_grad_(False)


def _build(model: PreTrainedModel) -> MtpModel:
    """Return a head with one layer for `model`, without weights. Raises UnknownHead if `transformers` has none."""
    try:
        head = MtpModel(model, 1)
    except ValueError as error:  # the config does not say what kind of layer it is
        raise UnknownHead(str(error)) from error
    kinds = getattr(head.config, "layer_types", None) or []
    if not STATE_KINDS.isdisjoint(kinds):
        raise UnknownHead(f"its layer is of kind {kinds[0]}, expected attention")
    return head


def _build_qwen(model: PreTrainedModel) -> MtpModel:
    """Return a head with the layout of Qwen3-Next and Qwen3.5, whose layer has full attention, without weights."""
    config = model.config.get_text_config()
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise UnknownHead("it has embeddings of its own, expected those of the model")
    number = next((n for n in (getattr(config, name, None) for name in _QWEN_NUM_LAYERS) if n), 1)
    kinds = getattr(config, "mtp_layer_types", None)
    missing = {"num_mtp_layers": number} | ({} if kinds else {"mtp_layer_types": ["full_attention"] * number})
    for name, value in missing.items():
        setattr(config, name, value)
    try:
        head = _build(model)
    finally:
        for name in missing:
            delattr(config, name)
    # `transformers` takes the class of the norms from the last layer of the model, which may be another kind of layer.
    norm, layer = type(model.get_decoder().norm), head.layers[0]
    for name in ("enorm", "hnorm", "post_norm"):
        setattr(layer, name, norm(config.hidden_size, eps=config.rms_norm_eps))
    return head


def _is_of_head(key: str, layers: int) -> bool:
    """Whether the tensor `key` of a checkpoint belongs to the head of a model with `layers` layers."""
    layer = re.search(r"\.layers\.(\d+)\.", key)
    return layer is not None and int(layer[1]) == layers or re.match(r"(model\.)?mtp\.", key) is not None
