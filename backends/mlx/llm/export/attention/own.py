"""Attention that a module computes itself, in place of the attention interface of `transformers`.

`Cache.update` returns `CachedStates`. A module that multiplies a query by the cached keys gets `Scores`. They hold no
scores, and only record what the module does to them: a scale, a mask, a bias, a softmax. The product of `Scores` and
the cached values is the attention over the cache. Anything else that a module does to its scores is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from .masks import Mask, function_of_tensor

# Functions of cached states that keep the values.
_LAYOUT_FUNCTIONS = (
    "reshape",
    "view",
    "transpose",
    "permute",
    "contiguous",
    "to",
    "float",
    "type",
    "type_as",
    "flatten",
    "expand",
    "unsqueeze",
    "squeeze",
    "swapaxes",
    "mT",
)
# Functions that leave `Scores` as they are, and softmax.
_ACCEPTED_FUNCTIONS = ("dropout", "contiguous", "clone", "float", "type", "type_as", "softmax")
# Other names of a function → the name under which `apply` gets it.
_NAMES = {
    "__matmul__": "matmul",
    "bmm": "matmul",
    "__truediv__": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__add__": "add",
    "__radd__": "add",
    "__get__": "mT",
}


class _TorchArgument:
    """An object that torch functions accept as an argument.

    Such a function returns what `apply(name of the function, function, arguments, options)` of the object returns.
    """

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        name = function.__name__
        name = _NAMES.get(name, name if name.endswith("__") else name.removesuffix("_"))
        every = pytree.tree_leaves((arguments, options))  # `torch.cat` takes a list of tensors
        owner = next(a for kind in (Scores, CachedStates) for a in every if isinstance(a, kind))
        return owner.apply(name, function, arguments, options or {})

    def __getattr__(self, name: str):
        function = getattr(torch.Tensor, name)
        if not callable(function):
            return self.__torch_function__(function.__get__, (), (self,))
        return lambda *arguments, **options: self.__torch_function__(function, (), (self, *arguments), options)

    def __matmul__(self, other):
        return torch.matmul(self, other)

    def __add__(self, other):
        return (
            torch.add(self, other)
            if isinstance(other, (torch.Tensor, float, int))
            else self.apply("add", torch.add, (self, other), {})
        )

    __radd__ = __add__

    def __mul__(self, other):
        return torch.mul(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other):
        return torch.div(self, other)


class CachedStates(_TorchArgument):
    """The keys or the values of a layer, as `Cache.update` returns them: `tensor` is the whole cache.

    A function that changes only the layout or the dtype returns `CachedStates` again. Other functions get `tensor`.
    """

    def __init__(self, tensor: torch.Tensor, layer: Any):
        self.tensor, self.layer = tensor, layer

    def apply(self, name, function, arguments, options):
        """Return the result of a torch function."""
        if name == "matmul" and arguments[1] is self and not isinstance(arguments[0], CachedStates):
            return Scores(self.layer, arguments[0], self.shape[-1])
        if name == "baddbmm" and not isinstance(arguments[0], CachedStates):
            return _baddbmm(*arguments, **options)
        if name == "scaled_dot_product_attention":
            return _sdpa(*arguments, **options)
        arguments, options = pytree.tree_map(_plain, (arguments, options))
        result = function(*arguments, **options)
        return CachedStates(result, self.layer) if name in _LAYOUT_FUNCTIONS else result

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    def size(self, axis: int | None = None):
        return self.shape if axis is None else self.shape[axis]

    def __getitem__(self, index):
        return self.tensor[index]


class Scores(_TorchArgument):
    """The scores of `query` [1, H, S, D] or [H, S, D] over `keys` keys of a layer, or the weights after the softmax.

    If `slopes` [H] is not None, the scores include the slopes times the positions of the keys. `shape` and `dtype` are
    those that the module expects.
    """

    def __init__(self, layer, query, keys, *, slopes=None, shape=None, dtype=None, is_softmax=False):
        self.layer, self.query, self.keys, self.slopes, self.is_softmax = layer, query, keys, slopes, is_softmax
        self.shape, self.dtype = torch.Size(shape or (*query.shape[:-1], keys)), dtype or query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, axis: int | None = None):
        return self.shape if axis is None else self.shape[axis]

    def changed(self, **changes) -> Scores:
        """Return scores that differ in the given attributes."""
        names = ("slopes", "shape", "dtype", "is_softmax")
        query = changes.pop("query", self.query)
        return Scores(self.layer, query, self.keys, **{name: getattr(self, name) for name in names} | changes)

    def apply(self, name, function, arguments, options):
        """Return the result of a torch function."""
        others = [argument for argument in arguments if argument is not self]
        if self.is_softmax:
            if name == "matmul" and arguments[0] is self and isinstance(arguments[1], CachedStates):
                return self._attend(arguments[1])
        elif name in ("mul", "div") and _is_scalar(others[0]) and (name == "mul" or arguments[0] is self):
            slopes = None if self.slopes is None else function(self.slopes, others[0])
            return self.changed(query=function(self.query, others[0]), slopes=slopes)
        elif name == "add":
            return self._plus(others[0])
        elif name == "masked_fill":
            return self._masked(arguments[1], hides=True)
        elif name == "where" and arguments[1] is self:
            return self._masked(arguments[0])
        elif name == "max" and len(others) == 1 and _is_lowest(others[0]):
            return self
        if name in ("view", "reshape"):
            sizes = arguments[1] if isinstance(arguments[1], (tuple, list)) else arguments[1:]
            return self.changed(shape=sizes)
        if name == "to" or name in _ACCEPTED_FUNCTIONS and (name != "softmax" or not self.is_softmax):
            dtypes = [a for a in (*arguments, *options.values()) if isinstance(a, torch.dtype)]
            dtype = torch.float32 if name == "float" else dtypes[0] if dtypes else self.dtype
            return self.changed(dtype=dtype, is_softmax=self.is_softmax or name == "softmax")
        raise ValueError(
            f"export_llm: model: {self.layer.name}: got {name} of the attention scores, expected a scale, a mask, a "
            "bias that is linear in the position of the key, a softmax, or the product with the values"
        )

    def _plus(self, other) -> Scores:
        if other is None or isinstance(other, Mask):
            return self._masked(other)
        slopes = self.layer.add_bias(other)
        if slopes is None:  # the layer recorded the bias as a mask
            return self
        return self.changed(slopes=slopes if self.slopes is None else self.slopes + slopes)

    def _masked(self, mask, hides: bool = False) -> Scores:
        """Record the mask. A mask tensor is true where a query attends or, if `hides` is set, does not attend."""
        if isinstance(mask, Mask):
            self.layer.add_mask(mask.function)
        elif mask is not None and not mask.is_meta:
            self.layer.add_mask(function_of_tensor(mask, hides))
        return self

    def _attend(self, values: CachedStates) -> torch.Tensor:
        # The scale is 1, because `query` already includes the scale of the module.
        query = self.query if self.query.ndim == 4 else self.query.unsqueeze(0)
        out = self.layer.attend(query, 1.0, slopes=self.slopes).to(self.dtype)
        return out if self.ndim == 4 else out.squeeze(0)


def _plain(argument):
    return argument.tensor if isinstance(argument, CachedStates) else argument


def _is_scalar(argument) -> bool:
    return isinstance(argument, (int, float)) or isinstance(argument, torch.Tensor) and argument.numel() == 1


def _is_lowest(argument) -> bool:
    """Whether `argument` is the lowest number of its dtype, below which no score is. While torch traces, it may be."""
    if not isinstance(argument, torch.Tensor) or argument.numel() != 1:
        return False
    return argument.is_meta or isinstance(argument, FakeTensor) or argument == torch.finfo(argument.dtype).min


def _baddbmm(bias, batch1, batch2, *, beta=1, alpha=1) -> Scores:
    return Scores(batch2.layer, batch1 * alpha, batch2.shape[-1]) + bias * beta


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None:
        key.layer.add_mask(attn_mask.function if isinstance(attn_mask, Mask) else function_of_tensor(attn_mask))
    return key.layer.attend(query, query.shape[-1] ** -0.5 if scale is None else scale)
