"""Loads GGUF files: the model with packed weights, the tokenizer and the chat template."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from .gguf_blocks import EXACT, FLOATS, GROUP_SIZE, float_tensor, packed_tensor
from .load_checks import shortened
from .packed import MLXEmbedding, install, is_experts, packable_weights
from .weights import compute_buffers, load_unpacked, tie

# The name of an architecture in GGUF → in transformers.
ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}
PERMUTED = ("llama",)  # llama.cpp reorders the rows of the query and key projections
OFFSET_NORMS = ("gemma2", "gemma3")  # the file has the weights of the norms with 1 added
# A key of the metadata, after the name of the architecture → the name in the config of transformers.
_CONFIG = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "rope.freq_base": "rope_theta",
}
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
        experts = " with experts" if self.architecture != "qwen3moe" and self.get("expert_count") else ""
        if self.architecture not in ARCHITECTURES or experts:
            raise ValueError(
                f"{self.path}: general.architecture: got {self.architecture}{experts}, expected one of "
                f"{', '.join(ARCHITECTURES)}"
            )

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
        values = {name: self.get(key) for key, name in _CONFIG.items()}
        values["head_dim"] = self.get("attention.key_length") or self.get("rope.dimension_count")
        if self.architecture in OFFSET_NORMS:
            values["query_pre_attn_scalar"] = values["head_dim"]
            if values["num_hidden_layers"] == _SCALED_BY_WIDTH[self.architecture]:
                values["query_pre_attn_scalar"] = values["hidden_size"] // values["num_attention_heads"]
        if self.architecture == "qwen3moe":
            values["norm_topk_prob"] = True
        embedding = next((t for t in self.tensors if t.name == "token_embd.weight"), None)
        if embedding is None or values["num_hidden_layers"] is None:
            raise ValueError(f"{self.path}: expected a tensor token_embd.weight and {self.architecture}.block_count")
        config = AutoConfig.for_model(
            ARCHITECTURES[self.architecture],
            vocab_size=int(embedding.shape[1]),
            tie_word_embeddings=all(t.name != "output.weight" for t in self.tensors),
            # Also set if None, because the default ids of a config class are those of one particular model.
            **{f"{name}_token_id": self.value(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()},
            # 0 stands for None, as for the sliding window of Phi-4.
            **{name: value or None for name, value in values.items() if value is not None},
        )
        self._set_rope(config)
        return config

    def _set_rope(self, config: PretrainedConfig) -> None:
        """Set the scaling of the rotary embedding. Raises ValueError if the kind of scaling is not supported."""
        rope = config.rope_parameters
        rotated = self.get("rope.dimension_count")
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kind = self.get("rope.scaling.type", "none")
        names = [t.name for t in self.tensors if t.name.startswith("rope_factors")]
        if kind not in ("none", "linear") or names or (rotated or width) != width:
            got = names[0] if names else f"rope.scaling.type {kind}, rope.dimension_count {rotated}"
            raise ValueError(
                f"{self.path}: got {got}, expected no scaling of the rotary embedding, or linear scaling, of "
                f"{width} dimensions"
            )
        if kind == "linear":
            # The layers of Gemma 3 with a sliding window have no scaling.
            rope = rope.get("full_attention", rope)
            rope.update(rope_type="linear", factor=self.get("rope.scaling.factor"))

    # Weights -----------------------------------------------------------------------------

    def _install(self, model: PreTrainedModel) -> torch.Tensor | None:
        """Install all tensors, and return the divisors of the rotary divisors, or None."""
        names, unpacked, inexact, unknown = self._names(model), {}, defaultdict(list), []
        divisors, gates = None, {}
        for tensor in self.tensors:
            name = names.get(tensor.name)
            if tensor.name == "rope_freqs.weight":
                divisors = float_tensor(tensor).float()
            elif name is None and (match := re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up)_exps\.weight", tensor.name)):
                gates.setdefault(int(match[1]), {})[match[2]] = tensor
            elif name is None:
                unknown.append(tensor.name)
            else:
                self._install_tensor(model, name, [tensor], unpacked, inexact)
        for layer, parts in gates.items():
            name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
            self._install_tensor(model, name, [parts["gate"], parts["up"]], unpacked, inexact)
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

    def _names(self, model: PreTrainedModel) -> dict[str, str]:
        """Return the name of each tensor in the file → its name in the model."""
        architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == self.architecture)
        table = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
        names = {}
        for name in model.state_dict():
            found = table.get_name(name, (".weight", ".bias"))
            if is_experts(model.get_submodule(name.rpartition(".")[0])) and found is not None:
                found += ".weight"
            names[found] = name
        return names

    def _install_tensor(self, model, name: str, parts: list, unpacked: dict, inexact: dict) -> None:
        """Set the tensor `name` of the model to the concatenated rows of `parts`.

        If the tensor cannot stay packed, put it into `unpacked` instead. If the conversion of packed parts is not
        exact, append the packings to `inexact`, under their type.
        """
        path, _, leaf = name.rpartition(".")
        module, types = model.get_submodule(path), {part.tensor_type for part in parts}
        shape = [*getattr(module, leaf).shape]
        got = [sum(n) if i == len(shape) - 2 else n[0] for i, n in enumerate(zip(*(p.shape[::-1].tolist() for p in parts)))]
        if got != shape:
            raise ValueError(f"{self.path}: {parts[0].name}: got shape {got}, expected {shape}")
        if len(types) == 1 and types.isdisjoint(FLOATS) and leaf in packable_weights(module):
            packings = [packed_tensor(part) for part in parts]
            if (type_ := types.pop()) not in EXACT:
                inexact[type_] += packings
            operands = [self._ordered(torch.cat(part, -2) if len(parts) > 1 else part[0], name, model.config)
                        for part in zip(*(p.operands for p in packings))]
            install(model, path, leaf, *operands, bits=packings[0].bits, group_size=GROUP_SIZE, mode=packings[0].mode)
            return
        values = self._ordered(torch.cat([float_tensor(part) for part in parts], -2) if len(parts) > 1
                               else float_tensor(parts[0]), name, model.config)
        if self.architecture in OFFSET_NORMS and name.endswith("norm.weight"):
            values = values.float() - 1
        unpacked[name] = values

    def _ordered(self, rows: torch.Tensor, name: str, config: PretrainedConfig) -> torch.Tensor:
        """Return the rows in the order of transformers.

        The rotary embedding of llama.cpp combines neighbouring rows of a head. That of transformers combines
        row i with row i + D / 2.
        """
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if self.architecture not in PERMUTED or heads is None:
            return rows
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
