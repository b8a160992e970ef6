"""Low-rank adapters of linear layers (LoRA)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from ..random import dropout

# The number of seeds that a step has for its layers.
_SEEDS_PER_STEP = 1 << 16


@dataclass(frozen=True)
class LoRA:
    """The settings of an adapter: y = W x + alpha / r · B A x, with A `[r, K]` and B `[N, r]`.

    `targets` are patterns of names, as in a shell: of the last part of a layer's path, such as `q_proj` or `*_proj`, or
    of the whole path. `dropout` is the probability with which an element of the input of A is set to 0.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: Sequence[str] = ("q_proj", "v_proj")

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"LoRA: r: got {self.r}, expected at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA: dropout: got {self.dropout}, expected 0 up to 1, exclusive")
        if isinstance(self.targets, str) or not self.targets:
            raise ValueError(f"LoRA: targets: got {self.targets!r}, expected a list of patterns")

    def matches(self, path: str) -> bool:
        return any(fnmatchcase(path, t) or fnmatchcase(path.rpartition(".")[2], t) for t in self.targets)


class LoRALinear(torch.nn.Module):
    """A frozen linear layer `base` with an adapter, whose matrices are float32 buffers.

    A is drawn as torch and peft draw it, and B is 0, so that the layer first computes what `base` computes. If `seed`
    is set, an int64 tensor, elements are dropped, and the same seed drops the same elements.
    """

    def __init__(self, base: torch.nn.Module, lora: LoRA, generator: torch.Generator):
        super().__init__()
        self.base, self.scale, self.dropout = base, lora.alpha / lora.r, lora.dropout
        self.seed: torch.Tensor | None = None
        bound = 1 / math.sqrt(base.in_features)
        a = torch.empty(lora.r, base.in_features).uniform_(-bound, bound, generator=generator)
        self.register_buffer("lora_A", a)
        self.register_buffer("lora_B", torch.zeros(base.out_features, lora.r))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products with the adapter: that of the base layer, which a packed layer names."""
        dtype = getattr(self.base, "dtype", None) or self.base.weight.dtype
        return dtype if dtype.is_floating_point else self.lora_A.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x if self.seed is None or not self.dropout else dropout(x, self.dropout, seed=self.seed)
        low = torch.nn.functional.linear(kept, self.lora_A.to(x.dtype)) * self.scale
        return self.base(x) + torch.nn.functional.linear(low, self.lora_B.to(x.dtype))


def add_adapters(model: torch.nn.Module, lora: LoRA, seed: int = 0) -> dict[str, LoRALinear]:
    """Replace the linear layers of `model` that `lora` names, in place. Return the new layers by path.

    A linear layer is a module with `in_features` and `out_features`, also one with a packed weight. Raises ValueError
    if no layer matches.
    """
    generator = torch.Generator().manual_seed(seed)
    found = [path for path, module in _linear_layers(model) if lora.matches(path)]
    if not found:
        some = sorted({path.rpartition(".")[2] for path, _ in _linear_layers(model)})
        raise ValueError(f"LoRA: targets: got {', '.join(lora.targets)}, expected patterns of {', '.join(some)}")
    layers = {path: LoRALinear(model.get_submodule(path), lora, generator) for path in found}
    for path, layer in layers.items():
        model.set_submodule(path, layer)
    return layers


def _linear_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for path, module in model.named_modules():
        if hasattr(module, "in_features") and hasattr(module, "out_features"):
            yield path, module


def set_dropout_seeds(model: torch.nn.Module, step: torch.Tensor | None, seed: int = 0) -> None:
    """Give each adapter of `model` its seed in the step `step`, an int64 tensor. With None, no element is dropped."""
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for index, layer in enumerate(layers):
        layer.seed = None if step is None else (seed + step) * _SEEDS_PER_STEP + index
