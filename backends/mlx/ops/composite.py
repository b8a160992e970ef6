"""Lowers the composite operators of `custom_kernel_ops`, such as `mlx::sample`, by tracing their torch functions.

Some have an IR node of their own, an extension: `SampleNode`, whose kernels draw the same tokens, `MaskLogitsNode` and
`Int8QuantizedMatmulNode`. If extensions are allowed, the operators are lowered to these nodes. Without extensions,
`SampleNode` and `MaskLogitsNode` become replacements of the traced instructions.
"""

from __future__ import annotations

from functools import partial

import torch

from .. import custom_kernel_ops
from ..builder.lowering import Lowering
from ..builder.quantized_weights import packed_words
from ..builder.registry import REGISTRY, tracing_handler
from ..custom_kernel_ops.int8_activations import int8_quantized_matmul
from ..custom_kernel_ops.layer_state import read_layer_state
from ..custom_kernel_ops.logits_processors import mask_logits
from ..custom_kernel_ops.sample import sample
from ..serialization import ir

for _target, _function in custom_kernel_ops.COMPOSITES.items():
    if _target not in (sample, mask_logits, int8_quantized_matmul, read_layer_state):
        REGISTRY.add(_target, tracing_handler(_target, _function))

_trace_sample = tracing_handler(sample, custom_kernel_ops.COMPOSITES[sample])
_PARAMETER_DTYPES = {
    "temperature": torch.float32,
    "top_p": torch.float32,
    "seed": torch.int64,
    "top_k": torch.int64,
    "min_p": torch.float32,
}


@REGISTRY.lower(sample)
def lower_sample(P: Lowering, logits, **parameters):
    if not P.allow_extensions:
        return _emit_portable(P, logits, parameters)
    fields = {name: None if x is None else P.cast(x, _PARAMETER_DTYPES[name]) for name, x in parameters.items()}
    return P.emit(ir.SampleNode, logits=logits, **fields)


def _emit_portable(P: Lowering, logits, parameters):
    """Emit the torch code of `mlx::sample`. If possible, `SampleNode` replaces it in the runtime of this project."""
    trace = partial(_trace_sample, P, logits=logits, **parameters)
    given = {name: x for name, x in parameters.items() if x is not None}
    if "seed" not in given or any(x.dtype != _PARAMETER_DTYPES[name] for name, x in given.items()):
        return trace()
    return P.emit_replaceable(ir.SampleNode, {"logits": logits, **given}, trace)


_trace_mask_logits = tracing_handler(mask_logits, custom_kernel_ops.COMPOSITES[mask_logits])


@REGISTRY.lower(mask_logits)
def lower_mask_logits(P: Lowering, logits, allowed):
    if P.allow_extensions:
        return P.emit(ir.MaskLogitsNode, logits=logits, allowed=allowed)
    trace = partial(_trace_mask_logits, P, logits=logits, allowed=allowed)
    return P.emit_replaceable(ir.MaskLogitsNode, {"logits": logits, "allowed": allowed}, trace)


_trace_int8_quantized_matmul = tracing_handler(
    int8_quantized_matmul, custom_kernel_ops.COMPOSITES[int8_quantized_matmul]
)


@REGISTRY.lower(int8_quantized_matmul)
def lower_int8_quantized_matmul(P: Lowering, x, w, scales, biases, **packing):
    if not P.allow_extensions:
        return _trace_int8_quantized_matmul(P, x=x, w=w, scales=scales, biases=biases, **packing)
    return P.emit(ir.Int8QuantizedMatmulNode, x=x, w=packed_words(P, w), scales=scales, biases=biases, **packing)
