"""Lowers the composite operators of `custom_kernel_ops`, such as `mlx::sample`, by tracing their torch functions.

If extensions are allowed, `mlx::sample` is lowered to `SampleNode`, whose kernels draw the same tokens.
"""

from __future__ import annotations

import torch

from .. import custom_kernel_ops
from ..builder.registry import REGISTRY, tracing_handler
from ..custom_kernel_ops.sample import sample
from ..serialization import ir

for _target, _function in custom_kernel_ops.COMPOSITES.items():
    if _target is not sample:
        REGISTRY.add(_target, tracing_handler(_target, _function))

_trace_sample = tracing_handler(sample, custom_kernel_ops.COMPOSITES[sample])
_DTYPES = {"temperature": torch.float32, "top_p": torch.float32, "seed": torch.int64, "top_k": torch.int64}
_DTYPES["min_p"] = torch.float32


@REGISTRY.lower(sample)
def lower_sample(P, logits, **parameters):
    if not P.allow_extensions:
        return _trace_sample(P, logits=logits, **parameters)
    fields = {name: None if x is None else P.cast(x, _DTYPES[name]) for name, x in parameters.items()}
    return P.emit(ir.SampleNode, logits=logits, **fields, dtype=torch.int64)
