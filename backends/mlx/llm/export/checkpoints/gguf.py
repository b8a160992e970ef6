"""GGUF files: the model with packed weights, the tokenizer and the chat template."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..gguf.architectures import ARCHITECTURES, WITH_EXPERTS
from ..gguf.blocks import EXACT, FLOATS, GROUP_SIZE, float_tensor, packed_tensor
from ..gguf.config import config_of
from ..gguf.file import GGUFFile
from ..gguf.recipes import Recipe, has_whole_groups, in_columns
from ..gguf.tokenizer import load_tokenizer
from ..packed import MLXEmbedding, install, is_experts, is_linear, packable_weights
from .checkpoint import Checkpoint
from .checks import CHECKPOINT_ERRORS, shortened
from .install import finish, join_experts

# The types of tokens that do not come from ordinary text.
_MARKED = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
# Texts of tokens that end an answer.
_END_TEXTS = {
    "<end_of_turn>",
    "<turn|>",
    "<EOT>",
    "[EOT]",
    "<|call|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|return|>",
}
_GATE_UP = "ffn_gate_up_exps"  # gate and `up` projections of experts in one tensor


@dataclass(frozen=True)
class Source:
    """The tensors of a file from which a tensor of the model is made, and how. Without a recipe, rows are joined.

    `factors` are those of quantized parts whose values are multiplied by a number, or by one for each expert.
    """

    parts: Sequence[gguf.ReaderTensor]
    recipe: Recipe | None = None
    factors: Sequence[gguf.ReaderTensor | None] = ()


class GGUFCheckpoint(Checkpoint):
    """A GGUF file.

    The notes have a line about each format that MLX lacks, with the error of the conversion, and say if texts may have
    other tokens than in llama.cpp.
    Raises ValueError if a file is damaged or missing, or if the architecture is not one of `ARCHITECTURES`.
    """

    def __init__(self, path: Path):
        self.file = GGUFFile(path)
        super().__init__(self.file.path)
        self.architecture = self.file.architecture
        table, experts = (WITH_EXPERTS, " with experts") if self.file.get("expert_count") else (ARCHITECTURES, "")
        if self.architecture not in table:
            raise ValueError(
                f"{self.path}: general.architecture: got {self.architecture}{experts}, expected one of "
                f"{', '.join(table)}"
            )
        self.known = table[self.architecture]

    def tokenizer(self) -> Any:
        if self.file.value("tokenizer.ggml.tokens") is None:
            return None
        tokenizer, notes = load_tokenizer(self.path)
        self.notes += notes
        return tokenizer

    def end_ids(self) -> set[int]:
        """Return the ids of the tokens that end an answer: those that the metadata names, and those of known texts.

        Many files name only the token that ends a text, for instance files of Gemma 2 and 3, whose turns end with
        `<end_of_turn>`.
        """
        ids = {self.file.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
        if (types := self.file.value("tokenizer.ggml.token_type")) is not None:
            tokens = self.file.value("tokenizer.ggml.tokens", [])
            marked = {tokens[id]: id for id, type_ in enumerate(types[: len(tokens)]) if type_ in _MARKED}
            ids |= {marked[text] for text in _END_TEXTS & marked.keys()}
            if "<|return|>" in marked:  # gpt-oss, whose thoughts end with `<|end|>`
                ids.discard(marked.get("<|end|>"))
        return ids

    def _load(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """Weights in a quantized format are packed, a few rows at a time, and other weights keep their dtype."""
        model = self.empty_model()
        self._install(model)
        for module in model.modules():
            if isinstance(module, MLXEmbedding):
                module.compute_in(torch.float32)
        if self.file.has("rope_freqs.weight") and hasattr(model.model.rotary_emb, "inv_freq"):  # as in Llama 3
            model.model.rotary_emb.inv_freq /= float_tensor(self.file.tensors["rope_freqs.weight"]).float()
        ids = self.end_ids()
        if ids and model.generation_config is not None:
            model.generation_config.eos_token_id = sorted(ids)
        return model

    def empty_model(self) -> PreTrainedModel:
        """Return the model without weights. Raises ValueError if the metadata or the names of tensors do not match."""
        try:
            config = config_of(self.file, self.known)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except CHECKPOINT_ERRORS as error:
            raise ValueError(f"{self.path}: the metadata describe no model of transformers: {error!r}") from error
        self._sources(model)
        return model

    def _install(self, model: PreTrainedModel) -> None:
        """Install all tensors."""
        unpacked, inexact, sources = {}, defaultdict(list), self._sources(model)
        for name, source in sources.items():
            try:
                self._install_tensor(model, name, source, unpacked, inexact)
            except RuntimeError as error:  # from the package gguf for its type, or from torch for its shape
                first = source.parts[0]
                raise ValueError(f"{self.path}: {first.name}: got {first.tensor_type.name}: {error}") from error
        if self.file.get("nextn_predict_layers", 0):
            self.notes.append("left out the head for multi-token prediction")
        finish(model, unpacked)
        for type_, packings in inexact.items():
            squared_error, squared_norm = sum(p.squared_error for p in packings), sum(p.squared_norm for p in packings)
            rounding = (squared_error / max(squared_norm, 1e-30)) ** 0.5
            bits = packings[0].bits
            self.notes.append(
                f"{type_.name}: {len(packings)} weights converted to {bits} bits in groups of {GROUP_SIZE}, "
                f"relative error {rounding:.1e}"
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
            if all(map(self.file.has, parts)):
                sources[name] = Source([self.file.tensors[part] for part in parts], recipe)

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
        unknown = {name for name in self.file.tensors.keys() - used if not self._is_unused(name, model.config)}
        if unknown:
            raise ValueError(f"{self.path}: unexpected tensors for {type(model).__name__}: {shortened(unknown)}")
        return sources

    def _factor(self, weight: gguf.ReaderTensor, parts: set[str]) -> gguf.ReaderTensor | None:
        """Return the tensor with the factor of a quantized weight, or None.

        The scales of Gemma 4's experts have the name of a factor, but the model itself has them: they are in `parts`.
        """
        name = f"{weight.name.removesuffix('.weight')}.scale"
        return None if weight.tensor_type in FLOATS or name in parts else self.file.tensors.get(name)

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
    return None if match is None else f"blk.{match[1]}." if match[1] else ""


def _joined(tensors: Sequence[torch.Tensor], source: Source, module: torch.nn.Module) -> torch.Tensor:
    """Return the rows of the tensors of all parts as one tensor, and those of a single part unchanged."""
    if _GATE_UP in source.parts[0].name and not module.is_concatenated:
        tensors = tensors[0].chunk(2, 1)
    if is_experts(module):
        return join_experts(module, tensors)
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
