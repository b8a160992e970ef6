"""Rounding noise: random rounding errors in the values that eager torch computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# The relative rounding error of one operation, by dtype: two units in the last place for float32 and float64, one unit
# for float16 and bfloat16.
EPSILON = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float64: 2**-51}

# Operators that move, select, compare or convert values without a rounding error of their own.
_EXACT = frozenset(
    """abs alias_copy amax amin arange argmax argmin as_strided_copy bitwise_and bitwise_not
    bitwise_or cat ceil clamp clone constant_pad_nd copy copysign cummax detach detach_copy
    diagonal_copy embedding empty empty_strided expand_copy fill flip floor full full_like gather getitem index
    index_fill index_put index_select kthvalue lift_fresh_copy masked_fill max max_pool2d_with_indices maximum median
    min minimum nan_to_num neg new_empty new_full new_ones new_zeros ones ones_like permute_copy relu repeat roll round
    scalar_tensor scatter select_copy select_scatter sign slice_copy slice_scatter sort split_copy
    split_with_sizes_copy squeeze_copy stack t_copy topk transpose_copy tril triu trunc unbind_copy unfold_copy
    unsqueeze_copy view_copy where zeros zeros_like cache_update""".split()
)

# Conversions. `_keeps_precision` tells which are exact: those to an integer, or to a dtype with no less precision.
_CONVERSIONS = frozenset("_to_copy _to_dim_order_copy convert_element_type".split())

# Operators with several roundings, where an early rounding error can be far larger than the result: in GELU, 1 + erf(x)
# almost cancels for negative x. They run as the elementary operators of their definition in torch.
_COMPOSED = frozenset(
    """_fused_rms_norm _log_softmax _scaled_dot_product_flash_attention_for_cpu addcdiv addcmul gelu lerp
    log_sigmoid_forward logsumexp mish mse_loss native_group_norm native_layer_norm softplus std var var_mean""".split()
)

# Sums of many values, and sums of products. A computed sum is the exact sum of operands with small relative errors
# (N. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, sections 3.1 and 4.2), so the noise of
# a sum is noise in its operands. If the terms cancel, this exceeds a relative error of the result by far.
_SUMS = frozenset(
    """_adaptive_avg_pool2d avg_pool1d avg_pool2d cumsum index_add logcumsumexp mean nansum scatter_add scatter_reduce
    sum upsample_bilinear2d upsample_linear1d""".split()
)
_PRODUCTS = frozenset(
    "_scaled_dot_product_attention_math addbmm addmm addmv baddbmm bmm convolution dot linear mm mv".split()
)


# Operators that round to few bits, and the relative size of the noise in their first operand. A rounding error of this
# operand rarely changes the result; if it does, the result changes by a whole step. With the usual noise, no step might
# change in the noisy runs of a small model.
_QUANTIZATIONS = {"quantize_entries": 2**-11, "int8_quantized_matmul": 2**-15}


class RoundingNoise(TorchDispatchMode):
    """While active, eager torch multiplies each floating-point element that it computes by 1 + epsilon or 1 - epsilon.

    The sign is random. `EPSILON` has epsilon for each dtype. The operands of sums get the same noise. Operators without
    rounding, and those that return an argument or a view of one, keep their results.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        definition = _definition(func)
        if definition is not None:
            with self:
                result = definition(*args, **kwargs)
        else:
            result = func(*self._noisy_operands(func, args), **kwargs)
        exact = _keeps_precision(args[0], result) if _name(func) in _CONVERSIONS else _is_exact(func)
        return result if exact else tree_map_only(torch.Tensor, self.perturbed, result)

    def _noisy_operands(self, func: Any, args: tuple) -> list:
        """Return `args`, with noise in the operands if `func` is a sum.

        In a product, the largest operand gets no noise: it is usually a weight, for which the noise would take long.
        """
        noisy, name = list(args), _name(func)
        if name in _QUANTIZATIONS:
            rounded = functools.partial(self.perturbed, epsilon=_QUANTIZATIONS[name])
            return [tree_map_only(torch.Tensor, rounded, args[0]), *args[1:]]
        if name in _SUMS | _PRODUCTS:
            operands = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
            spared = max(operands, key=lambda i: args[i].numel()) if name in _PRODUCTS else None
            for i in operands:
                noisy[i] = args[i] if i == spared else self.perturbed(args[i])
        return noisy

    def perturbed(self, value: torch.Tensor, epsilon: float | None = None) -> torch.Tensor:
        """Return `value` with noise in each element, by default that of one operation."""
        if value.dtype not in EPSILON or type(value) is not torch.Tensor:
            return value
        dtype = torch.promote_types(value.dtype, torch.float32)
        factor = torch.empty(value.shape, dtype=dtype).bernoulli_(0.5, generator=self.generator)
        epsilon = epsilon or EPSILON[value.dtype]
        factor.mul_(2 * epsilon).add_(1 - epsilon)
        return factor.mul_(value).to(value.dtype)


def _name(func: Any) -> str:
    """Return the name of an operator without namespace and overload."""
    return func._schema.name.partition("::")[2] if isinstance(func, torch._ops.OpOverload) else ""


def _keeps_precision(value: torch.Tensor, converted: torch.Tensor) -> bool:
    """Whether the conversion of `value` is exact. A conversion to a floating-point dtype with less precision rounds."""
    return EPSILON.get(converted.dtype, 0) <= EPSILON.get(value.dtype, 1)


@functools.cache
def _definition(func: Any) -> Callable | None:
    """Return the definition of a composed operator in torch, or None."""
    return decomposition_table.get(func) if _name(func) in _COMPOSED else None


@functools.cache
def _is_exact(func: Any) -> bool:
    """Whether `func` computes without rounding, or returns nothing, an argument or a view of one."""
    if not isinstance(func, torch._ops.OpOverload):
        return True
    schema = func._schema
    aliases = not schema.returns or any(v.alias_info is not None for v in schema.returns)
    return aliases or schema.name.partition("::")[2] in _EXACT
