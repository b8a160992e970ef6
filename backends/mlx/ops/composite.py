"""Lowers the composite operators of `custom_kernel_ops`, such as `mlx::sample`, by tracing their torch functions.

Some have an IR node of their own, an extension: `SampleNode`, whose kernels draw the same tokens, `MaskLogitsNode` and
`Int8QuantizedMatmulNode`, which needs the permission for extensions. The portable forms of the first two are the traced
functions.
"""

from __future__ import annotations

import torch

from .. import custom_kernel_ops
from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, tracing_handler
from ..custom_kernel_ops.int8_activations import int8_quantized_matmul
from ..custom_kernel_ops.layer_state import read_layer_state
from ..custom_kernel_ops.logits_processors import mask_logits
from ..custom_kernel_ops.sample import sample
from ..serialization import ir
from .lib.quantized_weights import packed_words

for _target, _function in custom_kernel_ops.COMPOSITES.items():
    if _target not in (sample, mask_logits, int8_quantized_matmul, read_layer_state):
        REGISTRY.add(_target, tracing_handler(_target, _function))

_PARAMETER_DTYPES = {
    "temperature": torch.float32,
    "top_p": torch.float32,
    "seed": torch.int64,
    "top_k": torch.int64,
    "min_p": torch.float32,
}


@REGISTRY.lower(sample)
def lower_sample(P: Lowering, logits, **parameters):
    fields = {name: None if x is None else P.cast(x, _PARAMETER_DTYPES[name]) for name, x in parameters.items()}
    if fields["seed"] is None and not P.allow_extensions:
        return P.trace(custom_kernel_ops.COMPOSITES[sample], logits, **fields)[0]
    return P.emit(ir.SampleNode, logits=logits, **fields)


@REGISTRY.form(ir.SampleNode)
def _sample(P: Lowering, n, env):
    parameters = {name: getattr(n, name) for name in _PARAMETER_DTYPES}
    return P.trace(custom_kernel_ops.COMPOSITES[sample], n.logits, **parameters)[0]


@REGISTRY.lower(mask_logits)
def lower_mask_logits(P: Lowering, logits, allowed):
    return P.emit(ir.MaskLogitsNode, logits=logits, allowed=allowed)


@REGISTRY.form(ir.MaskLogitsNode)
def _mask_logits(P: Lowering, n, env):
    return P.trace(custom_kernel_ops.COMPOSITES[mask_logits], n.logits, n.allowed)[0]


_trace_int8_quantized_matmul = tracing_handler(
    int8_quantized_matmul, custom_kernel_ops.COMPOSITES[int8_quantized_matmul]
)


@REGISTRY.lower(int8_quantized_matmul)
def lower_int8_quantized_matmul(P: Lowering, x, w, scales, biases, **packing):
    if not P.allow_extensions:
        return _trace_int8_quantized_matmul(P, x=x, w=w, scales=scales, biases=biases, **packing)
    return P.emit(ir.Int8QuantizedMatmulNode, x=x, w=packed_words(P, w), scales=scales, biases=biases, **packing)
