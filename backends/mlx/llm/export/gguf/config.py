"""The config in transformers of the model in a GGUF file."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from .architectures import KEYS, Architecture, windows
from .blocks import float_tensor
from .file import GGUFFile

# A special token: its name in the config of transformers → its name in GGUF.
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
# The number of layers of the models with 27 billion weights. These models derive the scale of the queries from
# hidden_size / num_attention_heads, and all others from head_dim.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Names in the config for which 0 in a file stands for None, as for the sliding window of Phi-4.
_NONE_IF_ZERO = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_UNROTATED = 1e29  # divides the frequencies of the dimensions that Gemma 4 does not rotate


def config_of(file: GGUFFile, known: Architecture) -> PretrainedConfig:
    """Return the config that the metadata and the shapes describe. Raises ValueError if they are incomplete."""
    settings = known.settings(file)
    keys = {key: name for key, name in {**KEYS, **known.keys}.items() if name not in settings}
    values = dict(known.values) | {name: _number(file, key) for key, name in keys.items()}
    values |= {"num_hidden_layers": file.layer_count, "vocab_size": file.row_count("token_embd.weight")}
    rotated, width = file.get("rope.dimension_count"), file.get("attention.key_length")
    if width is None and known.rotates_part:
        width = values["hidden_size"] // values["num_attention_heads"]
    if known.rotates_part and rotated:
        values["partial_rotary_factor"] = rotated / width
    values["head_dim"] = width or rotated
    if file.architecture in _SCALED_BY_WIDTH:
        values["query_pre_attn_scalar"] = values["head_dim"]
        if values["num_hidden_layers"] == _SCALED_BY_WIDTH[file.architecture]:
            values["query_pre_attn_scalar"] = values["hidden_size"] // values["num_attention_heads"]
    if (has_window := windows(file)) is not None:
        values["layer_types"] = ["sliding_attention" if has else "full_attention" for has in has_window]
    values = {name: value for name, value in values.items() if value is not None} | settings
    width = values.get("global_head_dim") or values.get("head_dim")
    if not known.rotates_part and rotated not in (None, width):
        raise ValueError(f"{file.path}: got rope.dimension_count {rotated}, expected the size of a head, {width}")
    config = AutoConfig.for_model(
        values.pop("model_type", known.kind),
        tie_word_embeddings=not file.has("output.weight"),
        # Also set if None, because the default ids of a config class are those of one particular model.
        **{f"{name}_token_id": file.value(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()},
        **{name: file.has(tensor) for name, tensor in known.biases.items()},
        **{name: None if name in _NONE_IF_ZERO and not value else value for name, value in values.items()},
    )
    _set_rope(file, config)
    return config


def _number(file: GGUFFile, key: str) -> Any:
    """Like `GGUFFile.get`, for a key that may have a value for each layer. Layers without attention have 0 heads.

    Raises ValueError if the other values differ.
    """
    value = file.get(key)
    if not isinstance(value, list):
        return value
    numbers = set(value) - {0} or {0}
    if len(numbers) != 1:
        raise ValueError(f"{file.path}: {file.architecture}.{key}: got {value}, expected one number for all layers")
    return numbers.pop()


def _set_rope(file: GGUFFile, config: PretrainedConfig) -> None:
    """Set the parameters of the rotary embedding. Raises ValueError if they are not supported."""
    # The layers of Gemma 3 with a sliding window have no scaling.
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    of_windows = config.rope_parameters.get("sliding_attention")
    for key, parameters in (("rope.freq_base", rope), ("rope.freq_base_swa", of_windows)):
        if parameters is not None and (base := file.get(key)):
            parameters["rope_theta"] = base
    kind = file.get("rope.scaling.type", "none")
    scaling = {"factor": file.get("rope.scaling.factor")}
    factors = {name: t for name, t in file.tensors.items() if name.startswith("rope_factors")}
    if factors:
        kind = "longrope"
        scaling = {
            f"{name}_factor": float_tensor(factors[f"rope_factors_{name}.weight"]).tolist()
            for name in ("short", "long")
        }
        scaling["attention_factor"] = file.get("rope.scaling.attn_factor", 1.0)
    elif kind == "yarn":
        scaling |= {name: file.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling["attention_factor"] = file.get("rope.scaling.yarn_attn_factor")
        multiplier = file.get("rope.scaling.yarn_log_multiplier")
        if multiplier and file.architecture == "deepseek2":  # its files have the product with 0.1
            multiplier *= 10
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), multiplier)
    elif kind not in ("none", "linear"):
        raise ValueError(f"{file.path}: got rope.scaling.type {kind}, expected none, linear or yarn")
    if kind in ("longrope", "yarn"):
        original = file.get("rope.scaling.original_context_length", config.max_position_embeddings)
        scaling["original_max_position_embeddings"] = original
    if kind in ("linear", "yarn") and not scaling["factor"]:
        raise ValueError(f"{file.path}: got rope.scaling.type {kind}, expected rope.scaling.factor as well")
    if kind != "none":
        rope |= {"rope_type": kind} | scaling
    elif rope.get("rope_type") == "proportional":
        rope["partial_rotary_factor"] = _rotated_part(file)
    else:
        rope["rope_type"] = "default"
    if file.architecture == "mistral3":
        rope["llama_4_scaling_beta"] = file.get("attention.temperature_scale", 0.0)


def _rotated_part(file: GGUFFile) -> float:
    """Return the part of a head that Gemma 4 rotates in layers without a window."""
    if not file.has("rope_freqs.weight"):
        return 1.0
    divisors = float_tensor(file.tensors["rope_freqs.weight"])
    rotated = divisors < _UNROTATED
    if not (divisors[rotated] == 1).all():
        got = divisors.tolist()
        raise ValueError(f"{file.path}: rope_freqs.weight: got {got}, expected 1 or at least {_UNROTATED}")
    return rotated.float().mean().item()
