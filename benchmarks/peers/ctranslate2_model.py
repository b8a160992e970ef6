"""Converts a checkpoint for CTranslate2. Needs the packages of the peer ctranslate2.

    python benchmarks/peers/ctranslate2_model.py CHECKPOINT float32|int8 FOLDER

int8 has a scale for each row and no zero points, for all matrices.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from ctranslate2.converters import TransformersConverter
from onnxruntime_model import add_tokenizer


def convert(checkpoint: Path, weight_format: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        for file in checkpoint.iterdir():
            (source / file.name).symlink_to(file.resolve())
        add_tokenizer(source)
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "word0")  # CTranslate2 requires them
        settings = source / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | special))
        TransformersConverter(str(source)).convert(str(folder), quantization=weight_format)


if __name__ == "__main__":
    source, weight_format, target = sys.argv[1:]
    unfinished = Path(f"{target}.part")
    convert(Path(source), weight_format, unfinished)
    unfinished.rename(target)
