"""Converts a checkpoint for OpenVINO, with optimum-intel. Needs the packages of the peer openvino.

    python benchmarks/peers/openvino_model.py CHECKPOINT float32|bf16|int8|int4 FOLDER

CHECKPOINT has bfloat16 weights for bf16, and float32 weights otherwise. int4 has scales and zero points for groups of
64, and int8 for each row, for all matrices. The embedding and the output projection are one matrix.
"""

from __future__ import annotations

from pathlib import Path

import torch
from conversion import main
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

QUANTIZED = {
    "int8": OVWeightQuantizationConfig(bits=8, sym=False),
    "int4": OVWeightQuantizationConfig(bits=4, sym=False, group_size=64, ratio=1.0, all_layers=True),
}


def convert(checkpoint: Path, weight_format: str, folder: Path) -> None:
    dtype = torch.bfloat16 if weight_format == "bf16" else torch.float32
    model = OVModelForCausalLM.from_pretrained(
        checkpoint,
        export=True,
        compile=False,
        load_in_8bit=False,
        quantization_config=QUANTIZED.get(weight_format),
        dtype=dtype,
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(convert)
