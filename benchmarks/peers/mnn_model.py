"""Converts a checkpoint for MNN, with llmexport. Needs the packages of the peer mnn.

    python benchmarks/peers/mnn_model.py CHECKPOINT float32|int8|int4 FOLDER

int8 and int4 have scales and zero points for groups of 64, with one matrix for the embedding and the output projection.
float32 has float16 weights in the file, because llmexport has no other float weights.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path

from conversion import links_to, main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BITS = {"float32": 16, "int8": 8, "int4": 4}
GROUP = 64


def add_tokenizer(folder: Path) -> None:
    """Write a tokenizer to `folder` with a token for each byte, and invented words for the other ids."""
    config = json.loads((folder / "config.json").read_text())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"<word{i}>" for i in range(len(alphabet), config["vocab_size"])]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate([*alphabet, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def switch_off_log() -> None:
    """Replace MNN's module that installs a package with pip and sends each conversion to a server of Alibaba Cloud."""
    module = types.ModuleType("MNN.tools.utils.log")
    module.mnn_logger = types.SimpleNamespace(put_log=lambda *arguments: False)
    sys.modules[module.__name__] = module


def convert(checkpoint: Path, weight_format: str, folder: Path) -> None:
    switch_off_log()
    # llmexport imports its modules by names that exist only in its own folder.
    package = Path(importlib.util.find_spec("llmexport").submodule_search_locations[0])
    with links_to(checkpoint) as source, contextlib.chdir(source.parent):  # for the converter's log
        add_tokenizer(source)
        sys.path.insert(0, str(package))
        importlib.import_module("llmexport").export(
            str(source),
            type=json.loads((source / "config.json").read_text())["model_type"],
            export="mnn",
            quant_bit=BITS[weight_format],
            quant_block=GROUP,
            dst_path=str(folder),
        )


if __name__ == "__main__":
    main(convert)
