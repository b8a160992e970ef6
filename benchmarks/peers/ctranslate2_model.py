"""Converts a checkpoint for CTranslate2. Needs the packages of the peer ctranslate2.

    python benchmarks/peers/ctranslate2_model.py CHECKPOINT float32|int8 FOLDER

int8 has a scale for each row and no zero points, for all matrices.
"""

from __future__ import annotations

import json
from pathlib import Path

from conversion import links_to, main
from ctranslate2.converters import TransformersConverter
from onnxruntime_model import add_tokenizer


def convert(checkpoint: Path, weight_format: str, folder: Path) -> None:
    with links_to(checkpoint) as source:
        add_tokenizer(source)
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "word0")  # CTranslate2 requires them
        settings = source / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | special))
        TransformersConverter(str(source)).convert(str(folder), quantization=weight_format)


if __name__ == "__main__":
    main(convert)
