"""Converts a checkpoint for ONNX Runtime GenAI, with its model builder. Needs the packages of the peer onnxruntime.

    python benchmarks/peers/onnxruntime_model.py CHECKPOINT float32|int4|w8a8|w4a8 FOLDER

int4 has float32 activations, and w8a8 and w4a8 round activations to 8 bits: the CPU kernels for 8-bit weights are made
for that, and otherwise convert all weights to float32 in each step. Weights have scales and zero points for groups of
64, with one matrix for the embedding and the output projection. w8a8 is an exception: its embedding is a float32 matrix
of its own, because the builder can share 4-bit matrices only. There is no bf16: the CPU provider lacks operators.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from conversion import links_to, main
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

QUANTIZED = ["block_size=64", "is_symmetric=false", "algo_config=rtn"]
SHARED = [*QUANTIZED, "shared_embeddings=true"]
FORMATS = {  # format → precision, options of the builder; accuracy level 1 is float32 activations, and 4 is int8
    "float32": ("fp32", []),
    "int4": ("int4", [*SHARED, "accuracy_level=1"]),
    "w8a8": ("int8", [*QUANTIZED, "accuracy_level=4"]),
    "w4a8": ("int4", [*SHARED, "accuracy_level=4"]),
}


def add_tokenizer(folder: Path) -> None:
    """Write a tokenizer of invented words to `folder`: the builder requires one."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {f"word{i}": i for i in range(size)}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def convert(checkpoint: Path, weight_format: str, folder: Path) -> None:
    precision, options = FORMATS[weight_format]
    with links_to(checkpoint) as source, tempfile.TemporaryDirectory() as cache:
        add_tokenizer(source)
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", folder]
        command += ["-p", precision, "-e", "cpu", "-c", cache]
        command += ["--extra_options", *options, "prune_lm_head=true", "hf_token=false"]
        subprocess.run([*map(str, command)], check=True)


if __name__ == "__main__":
    main(convert)
