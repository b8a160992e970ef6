"""Quantization tuned on a text: each column makes up for the errors of the columns and layers before it.

The method is GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323), with the scales of `scale_search`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ....custom_ops.packing import pack
from ..packed import is_linear
from .scale_search import integers, search

_DAMPING = 0.01  # is added to the diagonal of the second moments, relative to its mean


def tuned(
    w: torch.Tensor, moments: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize floats [N, K] in affine mode for inputs with the second moments `moments` [K, K].

    Columns are quantized one after the other. After each, the weights of the later columns are changed so that the
    product with such inputs stays as close as possible. Returns what `packing.quantize` returns.
    """
    w = w.detach().float().clone()
    diagonal = moments.diagonal()
    damping = _DAMPING * diagonal.mean().clamp(min=1e-8)
    damped = moments + damping * torch.eye(len(moments), device=w.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True)
    codes, scales, biases = torch.empty_like(w, dtype=torch.uint8), [], []
    for first in range(0, w.shape[1], group_size):
        group = slice(first, first + group_size)
        importance = diagonal[group] + damping
        scale, bias = search(w[:, group], bits, dtype, importance)
        errors = torch.empty_like(w[:, group])
        for k in range(first, first + group_size):
            column = w[:, k : k + 1]
            q = integers(column, scale, bias, bits)
            codes[:, k] = q[:, 0].to(torch.uint8)
            value = q * scale.float().unsqueeze(-1) + bias.float().unsqueeze(-1)
            error = (column - value) / upper[k, k]
            w[:, k : first + group_size] -= error * upper[k, k : first + group_size]
            errors[:, k - first] = error[:, 0]
        w[:, first + group_size :] -= errors @ upper[group, first + group_size :]
        scales.append(scale)
        biases.append(bias)
    return pack(codes, bits), torch.stack(scales, -1), torch.stack(biases, -1)


@torch.no_grad()
def visit_decoder_layers(
    model: torch.nn.Module, tokens: torch.Tensor, visit: Callable[[str, dict[str, torch.Tensor]], None]
) -> None:
    """Run `model` over `tokens` [B, S] and call `visit` for each of its decoder layers, in order.

    `visit` gets the path of the decoder layer, and a dictionary: the path of each linear layer in it → the second
    moments [K, K] of the inputs of this linear layer. It may replace the linear layers. The decoder layer runs again
    after `visit`, so that the inputs of the following layers come from the replaced ones.
    """
    handles = [
        layer.register_forward_pre_hook(_visiting(path, visit), with_kwargs=True)
        for path, layer in decoder_layers(model)
    ]
    try:
        model(tokens, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()


def decoder_layers(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Module]]:
    """Return the paths and modules of the decoder layers: the elements of the longest `ModuleList`."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)]
    path, layers = max(lists, key=lambda item: len(item[1]), default=("", ()))
    return [(f"{path}.{i}", layer) for i, layer in enumerate(layers)]


def _visiting(path: str, visit: Callable) -> Callable:
    is_inside = False

    def hook(decoder_layer, args, kwargs):
        nonlocal is_inside
        if is_inside:
            return
        is_inside = True
        try:
            visit(path, _moments(path, decoder_layer, args, kwargs))
        finally:
            is_inside = False

    return hook


def _moments(path: str, decoder_layer: torch.nn.Module, args: tuple, kwargs: dict) -> dict[str, torch.Tensor]:
    """Run `decoder_layer` and return the second moments of the inputs of its linear layers."""
    moments, handles = {}, []
    for name, layer in decoder_layer.named_modules():
        if is_linear(layer):

            def record(_, inputs, key=f"{path}.{name}"):
                x = inputs[0].flatten(0, -2).float()
                moments[key] = x.mT @ x / len(x)

            handles.append(layer.register_forward_pre_hook(record))
    decoder_layer(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return moments
