"""Chooses wider formats for the weights whose rounding changes the model's predictions most."""

from __future__ import annotations

import math
from typing import Any

import torch

from ....custom_ops.packing import dequantize
from .scale_search import Format, quantized

FORMATS = (Format(4, 64), Format(4, 32), Format(8, 64))  # the formats to choose from, narrowest first


def measure(model: torch.nn.Module, tokens: torch.Tensor, paths: list[str]) -> dict[str, list[float]]:
    """Return the estimated effect of quantizing each linear layer in `paths`, in each of `FORMATS`.

    The effect is half the mean square, over the tokens [B, S], of the first-order change of a token's loss: an
    estimate of the divergence between the predictions with and without the quantization. The measurement
    takes one forward and one backward pass through the float model for each row of `tokens`.
    """
    effects = {path: [0.0] * len(FORMATS) for path in paths}
    handles = []

    def watch(path):
        def hook(layer, inputs, output):
            x = inputs[0].detach().flatten(0, -2)

            def receive(gradient):
                gradient = gradient.flatten(0, -2).float()
                for index, format in enumerate(FORMATS):
                    effects[path][index] += _effect(layer.weight, x, gradient, format) / len(tokens)

            if output.requires_grad:
                output.register_hook(receive)

        return hook

    embedding = model.get_input_embeddings()
    handles.append(embedding.register_forward_hook(lambda _, __, y: y.requires_grad_()))
    for path in paths:
        handles.append(model.get_submodule(path).register_forward_hook(watch(path)))
    try:
        with torch.enable_grad():
            for row in tokens:
                logits = model(row[None], use_cache=False).logits[0, :-1].float()
                torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").backward()
    finally:
        for handle in handles:
            handle.remove()
    return effects


def _effect(weight: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor, format: Format) -> float:
    """Return half the mean square of the change of the loss when `weight` is quantized.

    `x` is the input of the layer, and `gradient` the gradient of the loss with respect to its output.
    """
    if weight.shape[1] % format.group_size:
        return math.inf
    operands = quantized(weight, format, torch.float16)
    change = dequantize(*operands, format.group_size, format.bits) - weight.float()  # type: ignore[call-arg]
    return float(((x.float() @ change.mT) * gradient).sum(-1).square().mean()) / 2


def choose(
    effects: dict[str, list[float]], counts: dict[str, int], budget: float, formats=FORMATS
) -> dict[str, Format]:
    """Return a format for each path, with at most `budget` bits a weight on average.

    Every layer begins with the first format whose group size divides the rows of its weight. Each step then changes the
    format of one layer: of the changes that fit the budget, it makes the one with the largest decrease of the effect
    per added bit. `effects` is the result of `measure`, and `counts` maps a path to the number of weights of the layer.
    """
    chosen = {
        path: min(i for i, effect in enumerate(of_path) if effect < math.inf) for path, of_path in effects.items()
    }
    free = sum((budget - formats[index].bits_per_weight) * counts[path] for path, index in chosen.items())
    while True:
        best: tuple[float, Any, Any, Any] = (0.0, None, None, None)
        for path, now in chosen.items():
            for wider in range(now + 1, len(formats)):
                cost = (formats[wider].bits_per_weight - formats[now].bits_per_weight) * counts[path]
                gain = (effects[path][now] - effects[path][wider]) / cost
                if cost <= free and gain > best[0]:
                    best = (gain, path, wider, cost)
        gain, path, wider, cost = best
        if path is None:
            return {path: formats[index] for path, index in chosen.items()}
        chosen[path] = wider
        free -= cost
