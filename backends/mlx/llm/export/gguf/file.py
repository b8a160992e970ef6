"""Loads GGUF files: the model with packed weights, the tokenizer and the chat template."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..checkpoints.load_checks import CHECKPOINT_ERRORS, shortened
from ..packed import MLXEmbedding, install, is_experts, is_linear, packable_weights
from ..weights import compute_buffers, load_unpacked, tie
from .architectures import ARCHITECTURES, KEYS, WITH_EXPERTS, windows
from .blocks import EXACT, FLOATS, GROUP_SIZE, float_tensor, packed_tensor
from .recipes import Recipe, has_whole_groups, in_columns
from .tokenizer import load_tokenizer

# A special token: its name in the config of transformers → its name in GGUF.
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
# The types of tokens that do not come from ordinary text.
_MARKED = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
# Texts of tokens that end an answer.
_END_TEXTS = {
    "<end_of_turn>", "<turn|>", "<EOT>", "[EOT]", "<|call|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>",
    "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|return|>",
}  # fmt: skip
# The number of layers of the models with 27 billion weights. These models derive the scale of the queries from
# hidden_size / num_attention_heads, and all others from head_dim.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Names in the config for which 0 in a file stands for None, as for the sliding window of Phi-4.
_NONE_IF_ZERO = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_GATE_UP = "ffn_gate_up_exps"  # gate and `up` projections of experts in one tensor
_UNROTATED = 1e29  # divides the frequencies of the dimensions that Gemma 4 does not rotate


def _parts(path: Path) -> list[Path]:
    """Return the files of the model in `path`, by the names that llama.cpp gives to the parts of a model."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{i + 1:05}-of-{match[2]}.gguf") for i in range(int(match[2]))]


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path, "c")  # copy-on-write: PyTorch warns about read-only memory
    except FileNotFoundError as error:
        raise ValueError(f"{path}: this part of the model is missing") from error
    except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:  # as `gguf` raises them
        raise ValueError(f"{path}: damaged or not a GGUF file: {error!r}") from error


@dataclass(frozen=True)
class Source:
    """The tensors of a file from which a tensor of the model is made, and how. Without a recipe, rows are joined.

    `factors` are those of quantized parts whose values are multiplied by a number, or by one for each expert.
    """

    parts: Sequence[gguf.ReaderTensor]
    recipe: Recipe | None = None
    factors: Sequence[gguf.ReaderTensor | None] = ()


@dataclass
class GGUFFile:
    """An open GGUF file, memory-mapped. If the file is one of several parts of a model, all parts are open.

    After `load`, `notes` has a line about each format that MLX lacks, with the error of the conversion. After
    `tokenizer`, it also says if texts may have other tokens than in llama.cpp.
    Raises ValueError if a file is damaged or missing, or if the architecture is not one of `ARCHITECTURES`.
    """

    path: Path
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        paths = _parts(Path(self.path))
        readers = [_open(path) for path in paths]
        self.path, self.reader = paths[0], readers[0]  # with the metadata
        self.tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        if (count := self.value("split.count", 1)) > 1 and count != len(readers):
            raise ValueError(f"{self.path}: got {len(readers)} of {count} parts, expected their original names")
        self.architecture = self.value("general.architecture")
        table, experts = (WITH_EXPERTS, " with experts") if self.get("expert_count") else (ARCHITECTURES, "")
        if self.architecture not in table:
            raise ValueError(
                f"{self.path}: general.architecture: got {self.architecture}{experts}, expected one of "
                f"{', '.join(table)}"
            )
        self.known = table[self.architecture]

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata, or `default` if the file lacks it."""
        return default if (found := self.reader.get_field(key)) is None else found.contents()

    def get(self, key: str, default: Any = None) -> Any:
        """Like `value`, for a key that begins with the name of the architecture. `key` is the part after this name."""
        return self.value(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """Like `get`, for a key without a default. Raises ValueError if the file lacks it."""
        if (value := self.get(key)) is None:
            raise ValueError(f"{self.path}: expected {self.architecture}.{key}")
        return value

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.tensors

    def has_any(self, leaf: str) -> bool:
        """Whether any layer has a tensor whose name ends in `leaf`."""
        return any(self.has(f"blk.{i}.{leaf}") for i in range(self.layer_count))

    def row_count(self, name: str) -> int:
        """Return the number of rows of a tensor. Raises ValueError if the file lacks it."""
        if not self.has(name):
            raise ValueError(f"{self.path}: expected a tensor {name}")
        return int(self.tensors[name].shape[-1])

    @property
    def layer_count(self) -> int:
        """The number of layers, without those of a head for multi-token prediction.

        Raises ValueError for more layers than have tensors: a model with millions of layers would fill the memory.
        """
        count = self.require("block_count") - self.get("nextn_predict_layers", 0)
        layers = {match[1] for name in self.tensors if (match := re.match(r"blk\.(\d+)\.", name))}
        if count > len(layers):
            message = f"got {count} layers, expected {len(layers)}, which have tensors"
            raise ValueError(f"{self.path}: {self.architecture}.block_count: {message}")
        return count

    def tokenizer(self) -> Any:
        """Return the tokenizer with its chat template, or None if the file has none."""
        if self.value("tokenizer.ggml.tokens") is None:
            return None
        tokenizer, unknown = load_tokenizer(self.path)
        if unknown is not None:
            self.notes.append(
                f"tokenizer.ggml.pre: got {unknown}, which is unknown: tokens may differ from those in training"
            )
        return tokenizer

    def end_ids(self) -> set[int]:
        """Return the ids of the tokens that end an answer: those that the metadata names, and those of known texts.

        Many files name only the token that ends a text, for instance files of Gemma 2 and 3, whose turns end with
        `<end_of_turn>`.
        """
        ids = {self.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
        if (types := self.value("tokenizer.ggml.token_type")) is not None:
            tokens = self.value("tokenizer.ggml.tokens", [])
            marked = {tokens[id]: id for id, type_ in enumerate(types[: len(tokens)]) if type_ in _MARKED}
            ids |= {marked[text] for text in _END_TEXTS & marked.keys()}
            if "<|return|>" in marked:  # gpt-oss, whose thoughts end with `<|end|>`
                ids.discard(marked.get("<|end|>"))
        return ids

    def load(self) -> PreTrainedModel:
        """Return the model. Weights in a quantized format are packed, and other weights keep their dtype.

        The rows of a tensor are converted a few at a time. Raises ValueError if the tensors do not match the model.
        """
        model = self.empty_model()
        self._install(model)
        compute_buffers(model)
        for module in model.modules():
            if isinstance(module, MLXEmbedding):
                module.compute_in(torch.float32)
        if self.has("rope_freqs.weight") and hasattr(model.model.rotary_emb, "inv_freq"):  # as in Llama 3
            model.model.rotary_emb.inv_freq /= float_tensor(self.tensors["rope_freqs.weight"]).float()
        ids = self.end_ids()
        if ids and model.generation_config is not None:
            model.generation_config.eos_token_id = sorted(ids)
        return model.eval()

    def empty_model(self) -> PreTrainedModel:
        """Return the model without weights. Raises ValueError if the metadata or the names of tensors do not match."""
        try:
            config = self.config()
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except CHECKPOINT_ERRORS as error:
            raise ValueError(f"{self.path}: the metadata describe no model of transformers: {error!r}") from error
        self._sources(model)
        return model

    # Config ------------------------------------------------------------------------------

    def config(self) -> PretrainedConfig:
        """Return the config that the metadata and the shapes describe. Raises ValueError if they are incomplete."""
        known = self.known
        settings = known.settings(self)
        keys = {key: name for key, name in (KEYS | known.keys).items() if name not in settings}
        values = dict(known.values) | {name: self._number(key) for key, name in keys.items()}
        values |= {"num_hidden_layers": self.layer_count, "vocab_size": self.row_count("token_embd.weight")}
        rotated, width = self.get("rope.dimension_count"), self.get("attention.key_length")
        if width is None and known.rotates_part:
            width = values["hidden_size"] // values["num_attention_heads"]
        if known.rotates_part and rotated:
            values["partial_rotary_factor"] = rotated / width
        values["head_dim"] = width or rotated
        if self.architecture in _SCALED_BY_WIDTH:
            values["query_pre_attn_scalar"] = values["head_dim"]
            if values["num_hidden_layers"] == _SCALED_BY_WIDTH[self.architecture]:
                values["query_pre_attn_scalar"] = values["hidden_size"] // values["num_attention_heads"]
        if (has_window := windows(self)) is not None:
            values["layer_types"] = ["sliding_attention" if has else "full_attention" for has in has_window]
        values = {name: value for name, value in values.items() if value is not None} | settings
        width = values.get("global_head_dim") or values.get("head_dim")
        if not known.rotates_part and rotated not in (None, width):
            raise ValueError(f"{self.path}: got rope.dimension_count {rotated}, expected the size of a head, {width}")
        config = AutoConfig.for_model(
            values.pop("model_type", known.kind),
            tie_word_embeddings=not self.has("output.weight"),
            # Also set if None, because the default ids of a config class are those of one particular model.
            **{f"{name}_token_id": self.value(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()},
            **{name: self.has(tensor) for name, tensor in known.biases.items()},
            **{name: None if name in _NONE_IF_ZERO and not value else value for name, value in values.items()},
        )
        self._set_rope(config)
        return config

    def _number(self, key: str) -> Any:
        """Like `get`, for a key that may have a value for each layer. Layers without attention have 0 heads.

        Raises ValueError if the other values differ.
        """
        value = self.get(key)
        if not isinstance(value, list):
            return value
        numbers = set(value) - {0} or {0}
        if len(numbers) != 1:
            raise ValueError(f"{self.path}: {self.architecture}.{key}: got {value}, expected one number for all layers")
        return numbers.pop()

    def _set_rope(self, config: PretrainedConfig) -> None:
        """Set the parameters of the rotary embedding. Raises ValueError if they are not supported."""
        # The layers of Gemma 3 with a sliding window have no scaling.
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        of_windows = config.rope_parameters.get("sliding_attention")
        for key, parameters in (("rope.freq_base", rope), ("rope.freq_base_swa", of_windows)):
            if parameters is not None and (base := self.get(key)):
                parameters["rope_theta"] = base
        kind = self.get("rope.scaling.type", "none")
        scaling = {"factor": self.get("rope.scaling.factor")}
        factors = {name: t for name, t in self.tensors.items() if name.startswith("rope_factors")}
        if factors:
            kind = "longrope"
            scaling = {f"{name}_factor": float_tensor(factors[f"rope_factors_{name}.weight"]).tolist()
                       for name in ("short", "long")}
            scaling["attention_factor"] = self.get("rope.scaling.attn_factor", 1.0)
        elif kind == "yarn":
            scaling |= {name: self.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
            scaling["attention_factor"] = self.get("rope.scaling.yarn_attn_factor")
            multiplier = self.get("rope.scaling.yarn_log_multiplier")
            if multiplier and self.architecture == "deepseek2":  # its files have the product with 0.1
                multiplier *= 10
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), multiplier)
        elif kind not in ("none", "linear"):
            raise ValueError(f"{self.path}: got rope.scaling.type {kind}, expected none, linear or yarn")
        if kind in ("longrope", "yarn"):
            original = self.get("rope.scaling.original_context_length", config.max_position_embeddings)
            scaling["original_max_position_embeddings"] = original
        if kind in ("linear", "yarn") and not scaling["factor"]:
            raise ValueError(f"{self.path}: got rope.scaling.type {kind}, expected rope.scaling.factor as well")
        if kind != "none":
            rope |= {"rope_type": kind} | scaling
        elif rope.get("rope_type") == "proportional":
            rope["partial_rotary_factor"] = self._rotated_part()
        else:
            rope["rope_type"] = "default"
        if self.architecture == "mistral3":
            rope["llama_4_scaling_beta"] = self.get("attention.temperature_scale", 0.0)

    def _rotated_part(self) -> float:
        """Return the part of a head that Gemma 4 rotates in layers without a window."""
        if not self.has("rope_freqs.weight"):
            return 1.0
        divisors = float_tensor(self.tensors["rope_freqs.weight"])
        rotated = divisors < _UNROTATED
        if not (divisors[rotated] == 1).all():
            got = divisors.tolist()
            raise ValueError(f"{self.path}: rope_freqs.weight: got {got}, expected 1 or at least {_UNROTATED}")
        return rotated.float().mean().item()

    # Weights -----------------------------------------------------------------------------

    def _install(self, model: PreTrainedModel) -> None:
        """Install all tensors."""
        unpacked, inexact, sources = {}, defaultdict(list), self._sources(model)
        for name, source in sources.items():
            try:
                self._install_tensor(model, name, source, unpacked, inexact)
            except RuntimeError as error:  # from the package gguf for its type, or from torch for its shape
                first = source.parts[0]
                raise ValueError(f"{self.path}: {first.name}: got {first.tensor_type.name}: {error}") from error
        if self.get("nextn_predict_layers", 0):
            self.notes.append("left out the head for multi-token prediction")
        tie(model, model.config, unpacked)
        load_unpacked(model, unpacked)
        for type_, packings in inexact.items():
            error = (sum(p.squared_error for p in packings) / max(sum(p.squared_norm for p in packings), 1e-30)) ** 0.5
            bits = packings[0].bits
            self.notes.append(
                f"{type_.name}: {len(packings)} weights converted to {bits} bits in groups of {GROUP_SIZE}, "
                f"relative error {error:.1e}"
            )

    def _is_unused(self, name: str, config: PretrainedConfig) -> bool:
        """Whether the model does without the tensor `name`.

        Besides the rotary frequencies, these are the tensors of a head for multi-token prediction, the keys and values
        of layers that use those of other layers, and the scales of quantized activations.
        """
        if name.endswith(".input_scale"):
            return True
        if (match := re.match(r"blk\.(\d+)\.(.*)", name)) is None:
            return name.startswith("rope_f")
        layer, count = int(match[1]), config.num_hidden_layers
        is_shared = layer >= count - (getattr(config, "num_kv_shared_layers", None) or 0)
        return layer >= count or is_shared and match[2].startswith(("attn_k", "attn_v"))

    def _sources(self, model: PreTrainedModel) -> dict[str, Source]:
        """Return how to make each tensor of the model for which the file has tensors, by the names in the model.

        Raises ValueError if the file has further tensors.
        """
        architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == self.architecture)
        table = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
        sources: dict[str, Source] = {}

        def add(name: str, parts: Sequence[str], recipe: Recipe | None = None) -> None:
            if all(map(self.has, parts)):
                sources[name] = Source([self.tensors[part] for part in parts], recipe)

        for name in model.state_dict():
            known = name
            for part, replacement in self.known.names.items():
                known = known.replace(part, replacement)
            if found := table.get_name(known, (".weight", ".bias")):
                add(name, [found if found.endswith((".weight", ".bias")) else f"{found}.weight"])
            for recipe in self.known.recipes:
                if (prefix := _prefix(name, recipe.name)) is not None:
                    add(name, [prefix + part for part in recipe.parts], recipe)
        for path, module in model.named_modules():
            if is_experts(module):
                prefix = _prefix(path, path.rpartition(".")[2])
                for ending, leaf in (("", "weight"), ("_bias", "bias"))[: 1 + module.has_bias]:
                    add(f"{path}.down_proj{ending}", [f"{prefix}ffn_down_exps.{leaf}"])
                    add(f"{path}.gate_up_proj{ending}", [f"{prefix}ffn_{part}_exps.{leaf}" for part in ("gate", "up")])
                    add(f"{path}.gate_up_proj{ending}", [f"{prefix}{_GATE_UP}.{leaf}"])
        parts = {part.name for source in sources.values() for part in source.parts}
        sources = {
            name: replace(source, factors=[self._factor(part, parts) for part in source.parts])
            for name, source in sources.items()
        }
        used = {t.name for source in sources.values() for t in (*source.parts, *source.factors) if t is not None}
        if unknown := [name for name in self.tensors if name not in used and not self._is_unused(name, model.config)]:
            raise ValueError(f"{self.path}: unexpected tensors for {type(model).__name__}: {shortened(unknown)}")
        return sources

    def _factor(self, weight: gguf.ReaderTensor, parts: set[str]) -> gguf.ReaderTensor | None:
        """Return the tensor with the factor of a quantized weight, or None.

        The scales of Gemma 4's experts have the name of a factor, but the model itself has them: they are in `parts`.
        """
        name = f"{weight.name.removesuffix('.weight')}.scale"
        return None if weight.tensor_type in FLOATS or name in parts else self.tensors.get(name)

    def _install_tensor(self, model, name: str, source: Source, unpacked: dict, inexact: dict) -> None:
        """Set the tensor `name` of the model.

        If the tensor cannot stay packed, put it into `unpacked` instead. If the conversion of packed parts is not
        exact, append the packings to `inexact`, under their type.
        """
        path, _, leaf = name.rpartition(".")
        module, parts, recipe = model.get_submodule(path), source.parts, source.recipe
        types = {part.tensor_type for part in parts}
        shape = [*getattr(module, leaf).shape]
        is_transposed = getattr(module, "is_transposed", False) and len(shape) == 3
        if is_transposed:
            shape[1:] = shape[:0:-1]
        columns = recipe.columns(model.config) if recipe and recipe.columns else None
        can_pack = not (recipe and recipe.values) and (columns is None or has_whole_groups(columns, GROUP_SIZE))
        factors = [None if t is None else float_tensor(t).float().flatten() for t in source.factors]
        if any(f is not None for f in factors):  # only a linear layer has a factor
            can_pack &= len(parts) == 1 and is_linear(module) and factors[0].numel() == 1
        if can_pack and len(types) == 1 and types.isdisjoint(FLOATS) and leaf in packable_weights(module):
            packings = [packed_tensor(part) for part in parts]
            if (type_ := types.pop()) not in EXACT:
                inexact[type_] += packings
            operands = [_joined(part, source, module) for part in zip(*(p.operands for p in packings))]
            self._check_shape(source, [*operands[0].shape[:-1], int(parts[0].shape[0])], shape)
            operands = [self._ordered(o, name, recipe, columns, model.config) for o in operands]
            quantization = {name: getattr(packings[0], name) for name in ("bits", "group_size", "mode")}
            if factors[0] is not None:
                quantization["factor"] = factors[0]
            install(model, path, leaf, *operands, **quantization)
            return
        values = [float_tensor(part) for part in parts]
        values = [v if f is None else v * f.view(-1, *[1] * (v.dim() - 1)) for v, f in zip(values, factors)]
        if recipe and recipe.values:
            values = recipe.values([v.float() for v in values])
        else:
            values = _joined(values, source, module)
        self._check_shape(source, [*values.shape], shape)
        values = self._ordered(values, name, recipe, columns, model.config).reshape(shape)
        if self.known.has_offset_norms and name.endswith("norm.weight") and recipe is None:
            values = values.float() - 1
        unpacked[name] = values.mT if is_transposed else values

    def _check_shape(self, source: Source, got: list[int], expected: list[int]) -> None:
        # Files leave out axes of size 1, and divide some vectors into groups.
        is_vector = len(expected) == 1 and math.prod(got) == expected[0]
        if not is_vector and [n for n in got if n != 1] != [n for n in expected if n != 1]:
            raise ValueError(f"{self.path}: {source.parts[0].name}: got shape {got}, expected {expected}")

    def _ordered(self, rows: torch.Tensor, name: str, recipe: Recipe | None, columns, config) -> torch.Tensor:
        """Return rows, those of a tensor or of an operand of a packed weight, in the order of transformers.

        The rotary embedding of llama.cpp combines neighbouring rows of a head. That of transformers combines
        row i with row i + D / 2.
        """
        if recipe and recipe.rows:
            rows = rows[recipe.rows(config)]
        if columns is not None:
            rows = in_columns(rows, columns, GROUP_SIZE)
        count = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if not self.known.is_permuted or count is None:
            return rows
        return rows.unflatten(0, (getattr(config, count), -1, 2)).transpose(1, 2).flatten(0, 2)


def _prefix(name: str, own_name: str) -> str | None:
    """Return the beginning of the names in the file, for a name in the model that ends in `own_name`, or None.

    `own_name` is the part of `name` after `layers.N.` or, outside the layers, the whole name.
    """
    match = re.fullmatch(rf"(?:.*\blayers\.(\d+)\.(?:.*\.)?)?{re.escape(own_name)}", name)
    return match and (f"blk.{match[1]}." if match[1] else "")


def _joined(tensors: Sequence[torch.Tensor], source: Source, module: torch.nn.Module) -> torch.Tensor:
    """Return the rows of the tensors of all parts as one tensor, and those of a single part unchanged.

    For experts, these are rows [E, N, ...] of gates and of `up` projections, which a file may already have joined.
    """
    if _GATE_UP in source.parts[0].name and not module.is_concatenated:
        tensors = tensors[0].chunk(2, 1)
    if len(tensors) == 1:
        return tensors[0]
    if not is_experts(module):
        return torch.cat(list(tensors))
    return torch.cat(list(tensors), 1) if module.is_concatenated else torch.stack(list(tensors), 2).flatten(1, 2)
