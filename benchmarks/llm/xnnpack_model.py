"""Exports the model of models.py to ExecuTorch's XNNPACK delegate, for benchmarks/llm.py.

    python benchmarks/llm/xnnpack_model.py SHAPE FORMAT CAPACITY FOLDER

writes FOLDER/<shape>-<format>-<capacity>-xnnpack.pte. No faster way to export a Hugging Face model for
XNNPACK is known to us. Attention and in-place cache updates run on ExecuTorch's kernels, and XNNPACK runs everything
that it supports. The output projection is computed for the last position only. One program takes 1 to
CHUNK tokens.

int4 is XNNPACK's own format, made from the float32 weights: weights in groups of 64 without zero points,
8-bit activations with a scale for each token, and an 8-bit embedding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import models
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  (registers torch.ops.llama)
from executorch.extension.llm.export.quantize import quantize_model_
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache, StaticLayer
from transformers.masking_utils import AttentionMaskInterface

CHUNK = 512


class InPlace(StaticLayer):
    """Keys and values `[1, capacity, heads, size]`, updated in place from position `start` on."""

    start: int = 0

    def lazy_initialization(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().lazy_initialization(keys, values)
        self.keys, self.values = (x.transpose(1, 2).contiguous() for x in (self.keys, self.values))

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_, **__):
        torch.ops.llama.update_cache(keys.transpose(1, 2), self.keys, self.start)
        torch.ops.llama.update_cache(values.transpose(1, 2), self.values, self.start)
        return self.keys, self.values


class Cached(torch.nn.Module):
    """`(tokens [1, S], positions [S]) -> logits [1, 1, V]` of the last token, with KV caches."""

    def __init__(self, model, capacity: int):
        super().__init__()
        config = model.config
        self.model, self.capacity = model, capacity
        self.cache = Cache(layers=[InPlace(capacity) for _ in range(config.num_hidden_layers)])
        heads, size = config.num_key_value_heads, config.head_dim
        self.cache.early_initialization(1, heads, size, torch.float32, torch.device("cpu"))
        for index, layer in enumerate(self.cache.layers):
            self.register_buffer(f"keys_{index}", layer.keys, persistent=False)
            self.register_buffer(f"values_{index}", layer.values, persistent=False)
        AttentionInterface.register("in_place", self.attend)
        AttentionMaskInterface.register("in_place", lambda *_, **__: None)
        model.set_attn_implementation("in_place")

    def attend(self, module, query, keys, values, mask, scaling=None, **_):
        start = self.cache.layers[module.layer_idx].start
        out = torch.ops.llama.custom_sdpa(query.transpose(1, 2), keys, values, start, None, 0.0, True, scaling)
        return out, None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        start = positions[0].item()
        torch._check(start >= 0)
        torch._check(start < self.capacity)
        torch._check(start + tokens.shape[1] <= self.capacity)
        for index, layer in enumerate(self.cache.layers):
            layer.start = start
            # Use the registered buffers: export would treat the tensors of the layer as constants.
            layer.keys, layer.values = getattr(self, f"keys_{index}"), getattr(self, f"values_{index}")
        return self.model(
            input_ids=tokens, position_ids=positions[None], past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits


def path_of(shape: str, form: str, capacity: int, root: Path) -> Path:
    return root / f"{shape}-{form}-{capacity}-xnnpack.pte"


@torch.no_grad()
def export(shape: str, form: str, capacity: int, root: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.float32_folder(shape, root), dtype=torch.float32)
    if form == "int4":
        quantize_model_(model, qlinear_config="8da4w", qlinear_group_size=64, qembedding_config="8w")
    length = torch.export.Dim("length", max=min(CHUNK, capacity))
    program = torch.export.export(
        Cached(model.eval(), capacity),
        (torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)),
        dynamic_shapes=({1: length}, {0: length}),
    )
    edge = to_edge_transform_and_lower(
        program,
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    # Fuses the 8-bit embedding and its dequantization into one kernel.
    lowered = edge.to_executorch(ExecutorchBackendConfig(do_quant_fusion_and_const_prop=form == "int4"))
    path = path_of(shape, form, capacity, root)
    unfinished = path.with_suffix(".part")
    with open(unfinished, "wb") as file:
        lowered.write_to_file(file)
    unfinished.rename(path)


if __name__ == "__main__":
    shape, form, capacity, root = sys.argv[1:]
    export(shape, form, int(capacity), Path(root))
