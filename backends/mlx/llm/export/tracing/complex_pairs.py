"""Complex numbers as pairs of real tensors, because some rotary embeddings use them and MLX programs cannot."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

# Methods that a pair applies to both parts.
_APPLIED_TO_BOTH = ("unsqueeze", "squeeze", "to", "view", "reshape", "expand", "transpose")


class Pair:
    """A complex tensor: its real and its imaginary part. A pair supports products and changes of its shape."""

    def __init__(self, real: torch.Tensor, imaginary: torch.Tensor):
        self.real, self.imag = real, imaginary

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function.__name__ in ("mul", "__mul__", "__rmul__", "multiply"):
            first, second = arguments
            return first * second if isinstance(first, Pair) else second * first
        raise ValueError(f"export_llm: model: got {function.__name__} of a complex tensor, expected a product")

    def __mul__(self, other: Pair | torch.Tensor | float) -> Pair:
        if not isinstance(other, Pair):
            return Pair(self.real * other, self.imag * other)
        real = self.real * other.real - self.imag * other.imag
        return Pair(real, self.real * other.imag + self.imag * other.real)

    __rmul__ = __mul__

    def __getattr__(self, name: str):
        if name not in _APPLIED_TO_BOTH:
            return getattr(self.real, name)  # such as `shape` and `device`, which are those of both parts
        return lambda *arguments, **options: Pair(
            *(getattr(part, name)(*arguments, **options) for part in (self.real, self.imag))
        )

    def __getitem__(self, index) -> Pair:
        return Pair(self.real[index], self.imag[index])


class ComplexPairs(TorchFunctionMode):
    """A mode in which `torch.polar` and `torch.view_as_complex` return a `Pair` instead of a complex tensor."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is torch.polar:
            length, angle = arguments
            return Pair(length * torch.cos(angle), length * torch.sin(angle))
        if function is torch.view_as_complex:
            return Pair(*arguments[0].unbind(-1))
        if function is torch.view_as_real:
            return torch.stack([arguments[0].real, arguments[0].imag], -1)
        return function(*arguments, **options)
