"""Weights in the quantized formats of `executorch.extension.llm`, repacked for MLX."""

import torch
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from executorch.extension.llm.export.mx import ExportableMXConfig
from executorch.extension.llm.export.nvfp4 import ExportableNVFP4Config
from oprows import bf16, f16, f32, floats, indices, pytest_function, row
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.quantization.quant_primitives import MappingType


def quantize_int4(layer):
    config = IntxWeightOnlyConfig(torch.int4, PerGroup(32), MappingType.ASYMMETRIC)
    quantize_(layer, config, lambda module, name: module is layer)
    packed = ExportableInt4Tensor.from_intx_unpacked_to_int8_tensor(layer.weight)
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)


def quantizer(config):
    return lambda layer: quantize_(layer, config, lambda module, name: module is layer)


FORMATS = {
    "dequantize_int4_tensor": quantize_int4,
    "dequantize_nvfp4": quantizer(ExportableNVFP4Config()),
    "dequantize_mx": quantizer(ExportableMXConfig()),
}


class Quantized(torch.nn.Module):
    """A layer of `dtype` with a quantized weight."""

    def __init__(self, layer, quantize, dtype):
        super().__init__()
        torch.manual_seed(0)
        layer = layer.to(f32 if dtype == f16 else dtype)  # NVFP4Tensor can be cast to float16, but not made of it
        with torch.no_grad():
            quantize(layer)
        self.layer = layer.to(dtype)

    def forward(self, x):
        return self.layer(x)


class AddedWeight(Quantized):
    """Adds the dequantized weight to the input, so that no matrix product uses the weight."""

    def forward(self, x):
        return x + self.layer.weight.dequantize()


def linear(quantize, dtype):
    return Quantized(torch.nn.Linear(64, 48), quantize, dtype)


def embedding(quantize, dtype):
    return Quantized(torch.nn.Embedding(32, 64), quantize, dtype)


PRODUCT, LOOKUP = ("QuantizedMatmulNode",), ("TakeNode", "DequantizeNode")

ROWS = [
    op_row
    for name, quantize in FORMATS.items()
    for op_row in (
        row(
            f"torchao::{name}",
            AddedWeight(torch.nn.Linear(64, 48), quantize, f32),
            floats(48, 64),
            dtypes=(f32,),
            edge_verified=False,
        ),
        *(
            row(
                f"torchao::{name}/linear {dtype}",
                linear(quantize, dtype),
                floats(2, 3, 64, low=-9, high=9),
                dtypes=(dtype,),
                loose=5,
                loose_half=4,
                nodes=PRODUCT,
                edge_verified=False,
            )
            for dtype in (f32, bf16, f16)
        ),
        *(
            row(
                f"torchao::{name}/embedding {dtype}",
                embedding(quantize, dtype),
                indices(2, 3, below=32),
                dtypes=(dtype,),
                nodes=LOOKUP,
                edge_verified=False,
            )
            for dtype in (f32, bf16)
        ),
    )
]

test_op_row = pytest_function(ROWS)
