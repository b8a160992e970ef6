"""Slots for LoRA adapters that are loaded while a program runs.

An adapted linear layer computes `base(x) + B[slot] (A[slot] x)`. The slots of all layers are mutable buffers, which the
method `load_adapter` writes. Slot 0 is never written: its zeros stand for no adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from transformers.pytorch_utils import Conv1D

from ...custom_ops.quantized import gathered_matmul
from .packed import MLXLinear, is_linear
from .quantization.tuning import decoder_layers


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer with adapters: the path of its module in the model, and its sizes."""

    path: str
    inputs: int
    outputs: int


class AdapterSlots(torch.nn.Module):
    """The adapters of the linear layers of `model`, which get forward hooks.

    - `slots`: the number of adapters that fit at once. `rank`: their largest rank.
    - `targets`: the last part of the path of each layer to adapt, or a pattern of whole paths such as
      `model.layers.*.mlp.*`. By default, all linear layers of the decoder layers.
    - `dtype`: the dtype of the buffers.

    `settle` must be called when the model has run once. Then the buffers `a_i` `[1, 1, slots + 1, rank * inputs]` and
    `b_i` `[1, 1, slots + 1, outputs * rank]` exist for each of `layers`. They have the layout of KV caches, so that a
    slot can be written in place.

    Raises ValueError if a target matches no layer.
    """

    def __init__(self, model: torch.nn.Module, slots: int, rank: int, targets: Sequence[str], dtype: torch.dtype):
        super().__init__()
        self.slots, self.rank, self.targets, self.dtype = slots, rank, tuple(targets), dtype
        self.layers: list[AdaptedLayer] = []
        self._slot: torch.Tensor | None = None  # of each row of the present call; None: no adapter has an effect
        self._called: set[str] = set()
        self._hooks = {}
        for path in self._paths(model):
            layer = model.get_submodule(path)
            self.layers.append(AdaptedLayer(path, *_sizes(layer)))
            self._hooks[path] = layer.register_forward_hook(self._hook_of(path))

    def _paths(self, model: torch.nn.Module) -> list[str]:
        linear = [path for path, module in model.named_modules() if _sizes(module) is not None]
        if not self.targets:
            inside = tuple(f"{path}." for path, _ in decoder_layers(model))
            return [path for path in linear if path.startswith(inside)]
        for target in self.targets:
            if not any(_matches(path, target) for path in linear):
                names = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
                raise ValueError(f"export_llm: adapter_targets: got {target}, expected linear layers such as {names}")
        return [path for path in linear if any(_matches(path, target) for target in self.targets)]

    def settle(self) -> None:
        """Leave out the layers that the model has not called, and create the buffers of the others.

        Some models use the weight of a layer without a call of the layer. Raises ValueError if such a layer is one of
        the `targets`.
        """
        for layer in list(self.layers):
            if layer.path not in self._called:
                self._refuse_target(layer.path)
                self._hooks.pop(layer.path).remove()
                self.layers.remove(layer)
        for i, layer in enumerate(self.layers):
            for name, size in ((f"a_{i}", layer.inputs), (f"b_{i}", layer.outputs)):
                zeros = torch.zeros(1, 1, self.slots + 1, self.rank * size, dtype=self.dtype)
                self.register_buffer(name, zeros)

    def _refuse_target(self, path: str) -> None:
        if self.targets:
            raise ValueError(f"export_llm: adapter_targets: {path}: the model does not call this layer as a whole")

    @contextmanager
    def applied(self, slot: torch.Tensor | None) -> Iterator[None]:
        """Within the context, calls of the model use the adapters in `slot` `[1]`, or `[W]` for the tokens of W rows.

        None, or a slot 0, stands for no adapter. Raises ValueError if the model bypasses an adapted layer.
        """
        self._slot = slot
        self._called.clear()
        try:
            yield
        finally:
            self._slot = None
        for layer in self.layers if slot is not None else ():
            if layer.path not in self._called:
                raise ValueError(
                    f"export_llm: adapters: {layer.path}: the model bypasses this layer; name others in adapter_targets"
                )

    def write(self, slot: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
        """Write A `[rank, inputs]` and B `[outputs, rank]` of each layer to `slot` `[1]`."""
        names = [f"{kind}_{i}" for i in range(len(self.layers)) for kind in "ab"]
        for name, weight in zip(names, weights, strict=True):
            buffer, entry = getattr(self, name), weight.reshape(1, 1, 1, -1).to(self.dtype)
            buffer.copy_(torch.ops.mlx.cache_update(buffer, entry, slot, False, None, 1))

    def example_weights(self) -> list[torch.Tensor]:
        """Return weights as `write` takes them, of zeros."""
        shapes = [s for layer in self.layers for s in ((self.rank, layer.inputs), (layer.outputs, self.rank))]
        return [torch.zeros(shape) for shape in shapes]

    def _hook_of(self, path: str):
        def hook(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
            self._called.add(path)
            return None if self._slot is None else output + self._change(path, args[0], output)

        return hook

    def _change(self, path: str, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return what the adapters add to `output`, the result of a layer for `x`."""
        index = next(i for i, layer in enumerate(self.layers) if layer.path == path)
        layer, rows = self.layers[index], self._slot.shape[0]
        if rows > 1 and x.numel() != rows * layer.inputs:
            raise ValueError(
                f"export_llm: adapters: {path}: a call for {rows} tokens of different rows has an input of shape "
                f"{list(x.shape)}, expected one vector for each; name other layers in adapter_targets"
            )
        # [rows, tokens of each, inputs]: the tokens of a single row, or one token of each row.
        x = x.reshape(rows, -1, layer.inputs) if rows > 1 or x.dim() != 3 else x
        a = getattr(self, f"a_{index}").view(-1, self.rank, layer.inputs)
        b = getattr(self, f"b_{index}").view(-1, layer.outputs, self.rank)
        change = gathered_matmul(gathered_matmul(x.to(self.dtype), a, self._slot), b, self._slot)
        return change.reshape(output.shape).to(output.dtype)


def _sizes(module: torch.nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer, or None for another module."""
    if is_linear(module) or isinstance(module, MLXLinear):
        return module.in_features, module.out_features
    return tuple(module.weight.shape) if type(module) is Conv1D else None


def _matches(path: str, target: str) -> bool:
    return path.rpartition(".")[2] == target or fnmatchcase(path, target)
