"""Loads GGUF files: the model with packed weights, the tokenizer and the chat template."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from .gguf_architectures import ARCHITECTURES, KEYS, WITH_EXPERTS
from .gguf_blocks import EXACT, FLOATS, GROUP_SIZE, float_tensor, packed_tensor
from .load_checks import shortened
from .packed import MLXEmbedding, install, is_experts, packable_weights
from .weights import compute_buffers, load_unpacked, tie

# The rules that split text before byte pairs are merged, as GGUF names them, that transformers follows. For the others,
# transformers takes those of GPT-2. smollm only adds that digits are separate, which its merges imply.
_SPLITS = (
    "dbrx", "deepseek-r1-qwen", "falcon3", "gpt-2", "gpt-4o", "llama-bpe", "llama-v3", "llama3", "pixtral", "qwen2",
    "smaug-bpe", "smollm", "tekken",
)  # fmt: skip
# A special token: its name in the config of transformers → its name in GGUF.
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
# The number of layers of the models with 27 billion weights. These models derive the scale of the queries from
# hidden_size / num_attention_heads, and all others from head_dim.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


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
        self.tensors = [tensor for reader in readers for tensor in reader.tensors]
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

    def tokenizer(self) -> Any:
        """Return the tokenizer with its chat template, or None if the file has none."""
        if self.value("tokenizer.ggml.tokens") is None:
            return None
        kind = self.value("tokenizer.ggml.pre")
        if self.value("tokenizer.ggml.model") == "gpt2" and kind not in _SPLITS:
            self.notes.append(
                f"tokenizer.ggml.pre: got {kind}, which is unknown: tokens may differ from those in training"
            )
        # transformers prefers the files of a tokenizer in the same folder.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / self.path.name).symlink_to(self.path.absolute())
            return AutoTokenizer.from_pretrained(folder, gguf_file=self.path.name)

    def load(self) -> PreTrainedModel:
        """Return the model. Weights in a quantized format are packed, and other weights keep their dtype.

        The rows of a tensor are converted a few at a time. Raises ValueError if the tensors do not match the model.
        """
        config = self.config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        divisors = self._install(model)
        compute_buffers(model)
        for module in model.modules():
            if isinstance(module, MLXEmbedding):
                module.factor = module.factor.float()
        if divisors is not None:  # Llama 3 divides its rotary frequencies
            model.model.rotary_emb.inv_freq /= divisors
        ids = {self.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
        if ids and model.generation_config is not None:
            model.generation_config.eos_token_id = sorted(ids)
        return model.eval()

    # Config ------------------------------------------------------------------------------

    def config(self) -> PretrainedConfig:
        """Return the config that the metadata and the shapes describe. Raises ValueError if they are incomplete."""
        known, names = self.known, {tensor.name for tensor in self.tensors}
        values = dict(known.values) | {name: self._number(key) for key, name in (KEYS | known.keys).items()}
        if "token_embd.weight" not in names or values["num_hidden_layers"] is None:
            raise ValueError(f"{self.path}: expected a tensor token_embd.weight and {self.architecture}.block_count")
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
        pattern = self.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):  # for each layer, whether it has a window
            values["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
        embedding = next(t for t in self.tensors if t.name == "token_embd.weight")
        config = AutoConfig.for_model(
            known.kind,
            vocab_size=int(embedding.shape[1]),
            tie_word_embeddings="output.weight" not in names,
            # Also set if None, because the default ids of a config class are those of one particular model.
            **{f"{name}_token_id": self.value(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()},
            **{name: tensor in names for name, tensor in known.biases.items()},
            # 0 stands for None, as for the sliding window of Phi-4.
            **{name: value or None for name, value in values.items() if value is not None},
        )
        self._set_rope(config)
        return config

    def _number(self, key: str) -> Any:
        """Like `get`, for a key that may have a value for each layer. Raises ValueError if the values differ."""
        value = self.get(key)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ValueError(f"{self.path}: {self.architecture}.{key}: got {value}, expected one number for all layers")
        return value[0]

    def _set_rope(self, config: PretrainedConfig) -> None:
        """Set the parameters of the rotary embedding. Raises ValueError if they are not supported."""
        # The layers of Gemma 3 with a sliding window have no scaling.
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        rotated = self.get("rope.dimension_count")
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if not self.known.rotates_part and (rotated or width) != width:
            raise ValueError(f"{self.path}: got rope.dimension_count {rotated}, expected the size of a head, {width}")
        of_windows = config.rope_parameters.get("sliding_attention")
        for key, parameters in (("rope.freq_base", rope), ("rope.freq_base_swa", of_windows)):
            if parameters is not None and (base := self.get(key)):
                parameters["rope_theta"] = base
        kind = self.get("rope.scaling.type", "none")
        scaling = {"factor": self.get("rope.scaling.factor")}
        factors = {t.name: t for t in self.tensors if t.name.startswith("rope_factors")}
        if factors:
            kind = "longrope"
            scaling = {f"{name}_factor": float_tensor(factors[f"rope_factors_{name}.weight"]).tolist()
                       for name in ("short", "long")}
            scaling["attention_factor"] = self.get("rope.scaling.attn_factor", 1.0)
        elif kind == "yarn":
            scaling |= {name: self.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), self.get("rope.scaling.yarn_log_multiplier"))
        elif kind not in ("none", "linear"):
            raise ValueError(f"{self.path}: got rope.scaling.type {kind}, expected none, linear or yarn")
        if kind in ("longrope", "yarn"):
            original = self.get("rope.scaling.original_context_length", config.max_position_embeddings)
            scaling["original_max_position_embeddings"] = original
        if kind in ("linear", "yarn") and not scaling["factor"]:
            raise ValueError(f"{self.path}: got rope.scaling.type {kind}, expected rope.scaling.factor as well")
        rope.update({"rope_type": "default"} if kind == "none" else {"rope_type": kind} | scaling)
        if self.architecture == "mistral3":
            rope["llama_4_scaling_beta"] = self.get("attention.temperature_scale", 0.0)

    # Weights -----------------------------------------------------------------------------

    def _install(self, model: PreTrainedModel) -> torch.Tensor | None:
        """Install all tensors, and return the divisors of the rotary divisors, or None."""
        names, parts_of = self._names(model)
        unpacked, inexact, unknown = {}, defaultdict(list), []
        divisors, joined = None, defaultdict(dict)
        for tensor in self.tensors:
            if tensor.name == "rope_freqs.weight":
                divisors = float_tensor(tensor).float()
            elif tensor.name in parts_of:
                name, index = parts_of[tensor.name]
                joined[name][index] = tensor
            elif tensor.name in names:
                joined[names[tensor.name]][0] = tensor
            elif not tensor.name.startswith("rope_factors"):
                unknown.append(tensor.name)
        for name, parts in joined.items():
            tensors = [parts[index] for index in sorted(parts)]
            try:
                self._install_tensor(model, name, tensors, unpacked, inexact)
            except NotImplementedError as error:  # from the package gguf
                first = tensors[0]
                raise ValueError(f"{self.path}: {first.name}: got {first.tensor_type.name}: {error}") from error
        if unknown:
            raise ValueError(f"{self.path}: unexpected tensors for {type(model).__name__}: {shortened(unknown)}")
        tie(model, model.config, unpacked)
        load_unpacked(model, unpacked)
        for type_, packings in inexact.items():
            error = (sum(p.squared_error for p in packings) / max(sum(p.squared_norm for p in packings), 1e-30)) ** 0.5
            bits = packings[0].bits
            self.notes.append(
                f"{type_.name}: {len(packings)} weights converted to {bits} bits in groups of {GROUP_SIZE}, "
                f"relative error {error:.1e}"
            )
        return divisors

    def _names(self, model: PreTrainedModel) -> tuple[dict[str, str], dict[str, tuple[str, int]]]:
        """Return two dictionaries: the name of a tensor in the file → its name in the model.

        The second one is for tensors that are a part of a tensor in the model: a name, and the index of the part.
        """
        architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == self.architecture)
        table = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
        names, parts = {}, {}
        for name in model.state_dict():
            known = name
            for part, replacement in self.known.names.items():
                known = known.replace(part, replacement)
            found = table.get_name(known, (".weight", ".bias"))
            if found is not None:
                names[found if found.endswith((".weight", ".bias")) else f"{found}.weight"] = name
        for path, module in model.named_modules():
            if is_experts(module):
                layer = re.search(r"\.(\d+)\.", path)[1]
                for ending, leaf in (("", "weight"), ("_bias", "bias"))[: 1 + module.has_bias]:
                    names[f"blk.{layer}.ffn_down_exps.{leaf}"] = f"{path}.down_proj{ending}"
                    for index, part in enumerate(("gate", "up")):
                        parts[f"blk.{layer}.ffn_{part}_exps.{leaf}"] = f"{path}.gate_up_proj{ending}", index
        return names, parts

    def _install_tensor(self, model, name: str, parts: list, unpacked: dict, inexact: dict) -> None:
        """Set the tensor `name` of the model to the joined rows of `parts`.

        If the tensor cannot stay packed, put it into `unpacked` instead. If the conversion of packed parts is not
        exact, append the packings to `inexact`, under their type.
        """
        path, _, leaf = name.rpartition(".")
        module, types = model.get_submodule(path), {part.tensor_type for part in parts}
        shape = [*getattr(module, leaf).shape]
        is_transposed = getattr(module, "is_transposed", False) and len(shape) == 3
        if is_transposed:
            shape[1:] = shape[:0:-1]
        got = [int(n) for n in reversed(parts[0].shape)]
        if len(parts) > 1:
            got[1] = sum(int(part.shape[-2]) for part in parts)
        # Files leave out axes of size 1.
        if [n for n in got if n != 1] != [n for n in shape if n != 1]:
            raise ValueError(f"{self.path}: {parts[0].name}: got shape {got}, expected {shape}")
        if len(types) == 1 and types.isdisjoint(FLOATS) and leaf in packable_weights(module):
            packings = [packed_tensor(part) for part in parts]
            if (type_ := types.pop()) not in EXACT:
                inexact[type_] += packings
            operands = [self._ordered(_joined(part, module), name, model.config)
                        for part in zip(*(p.operands for p in packings))]
            install(model, path, leaf, *operands, bits=packings[0].bits, group_size=GROUP_SIZE, mode=packings[0].mode)
            return
        rows = _joined([float_tensor(part) for part in parts], module)
        values = self._ordered(rows, name, model.config).reshape(shape)
        if self.known.has_offset_norms and name.endswith("norm.weight"):
            values = values.float() - 1
        unpacked[name] = values.mT if is_transposed else values

    def _ordered(self, rows: torch.Tensor, name: str, config: PretrainedConfig) -> torch.Tensor:
        """Return the rows in the order of transformers.

        The rotary embedding of llama.cpp combines neighbouring rows of a head. That of transformers combines
        row i with row i + D / 2.
        """
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if not self.known.is_permuted or heads is None:
            return rows
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _joined(parts: Sequence[torch.Tensor], experts: torch.nn.Module) -> torch.Tensor:
    """Return the rows [E, N, ...] of the parts of a weight of `experts` as one tensor, and a single part unchanged."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), 1) if experts.is_concatenated else torch.stack(list(parts), 2).flatten(1, 2)
