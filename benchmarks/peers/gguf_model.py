"""Writes a Qwen3 or Llama checkpoint as a GGUF file for llama.cpp. Needs the packages gguf and numpy.

    python benchmarks/peers/gguf_model.py FOLDER float32|bf16|int8|int4 FILE.gguf

int8 is Q8_0, and int4 is Q4_0, for all matrices including the embedding. The vocabulary consists of invented byte-pair
tokens, because the benchmark passes token ids and never text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
ARCHITECTURES = {"qwen3": gguf.MODEL_ARCH.QWEN3, "llama": gguf.MODEL_ARCH.LLAMA}  # by model_type of the checkpoint
FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "int8": gguf.LlamaFileType.MOSTLY_Q8_0,
    "int4": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def tensors(path: Path):
    """Yield the names and values of a safetensors file with float32 tensors."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise ValueError(f"{path}: {name}: got {entry['dtype']}, expected F32")
        first = 8 + length + entry["data_offsets"][0]
        yield name, np.memmap(path, np.float32, "r", first, tuple(entry["shape"]))


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Return `size` tokens of a byte-pair encoding, the 256 bytes and then pairs of earlier tokens, and its merges."""
    # GPT-2's tokenizer writes each byte as one visible character.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    tokens = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    merges, index = [], 0
    seen = set(tokens)
    while len(tokens) < size:
        left, right = tokens[index // 256], tokens[index % 256]
        index += 1
        if left + right not in seen:
            seen.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    return tokens[:size], merges


def interleaved(values: np.ndarray, head_dim: int) -> np.ndarray:
    """The rows of a query or key projection as llama.cpp expects them for Llama: rotary pairs side by side."""
    return values.reshape(-1, 2, head_dim // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def write(folder: Path, weight_format: str, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name("benchmark")
    writer.add_file_type(FILE_TYPES[weight_format])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(float(theta))
    tokens, merges = vocabulary(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, values in tensors(folder / "model.safetensors"):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        kind = TYPES[weight_format] if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        if architecture == gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, config["head_dim"])
        renamed = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(renamed, gguf.quants.quantize(np.asarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    source, weight_format, target = sys.argv[1:]
    unfinished = Path(target).with_suffix(".part")
    write(Path(source), weight_format, unfinished)
    unfinished.rename(target)
