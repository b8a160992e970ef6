"""Operators that lower by being traced: our own texts, and torch's decompositions.

ExecuTorch keeps the latter whole because it has kernels for them. Each entry costs nothing but
its name; one that deserves an MLX node of its own moves to its family.
"""

from __future__ import annotations

import torch
from torch._decomp import decomposition_table

from .. import custom_kernel_ops
from ..builder.registry import REGISTRY, traced

aten = torch.ops.aten

DECOMPOSED = [
    aten._native_batch_norm_legit.no_stats,
    aten.addmv.default,
    aten.elu.default,
    aten.grid_sampler_2d.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.native_layer_norm.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
]


for _target, _text in custom_kernel_ops.COMPOSITES.items():
    REGISTRY.add(_target, traced(_target, _text))
for _target in DECOMPOSED:
    REGISTRY.add(_target, traced(_target, decomposition_table[_target]))
