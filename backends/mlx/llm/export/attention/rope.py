"""Rotary embeddings whose frequencies depend on the position."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class StatelessRotary(torch.nn.Module):
    """The rotary embedding `rotary` of kind `dynamic` or `longrope`, computed from the positions alone.

    The modules of `transformers` for these kinds take the frequencies for the largest position of the call, and keep
    them in an attribute. An exported program has no such state, and its results must not depend on the other tokens of
    a call. This module therefore takes the frequencies of each token for the position of the token, as `transformers`
    does if it gets one token in each call. Apart from that, `forward` is that of `rotary`. If `rotary` has a kind for
    each type of layers, only those of the two kinds are changed.

    Phi-3.5-MoE also has a factor for the cosines and sines, which depends on the position. Beyond the original length,
    this module takes the frequencies for long contexts, like Microsoft's code; that of `transformers` keeps the others.
    """

    KINDS = ("dynamic", "longrope")

    def __init__(self, rotary: torch.nn.Module):
        super().__init__()
        self.rotary = rotary
        for layer_type, kind in _kinds(rotary).items():
            if kind == "longrope":
                length = self._settings(layer_type)["original_max_position_embeddings"]
                for name, limit in (("short", length), ("long", length + 1)):
                    frequencies = self._frequencies(layer_type, limit)
                    self.register_buffer(f"{_prefix(layer_type)}{name}", frequencies, persistent=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("rotary"), name)

    def _settings(self, layer_type: str | None) -> dict[str, Any]:
        parameters = self.rotary.config.rope_parameters
        return parameters if layer_type is None else parameters[layer_type]

    def _frequencies(self, layer_type: str | None, length) -> torch.Tensor:
        """Return the frequencies for a context of `length` positions. A tensor `[B, S, 1]` gives `[B, S, D / 2]`."""
        init = ROPE_INIT_FUNCTIONS[_kinds(self.rotary)[layer_type]]
        device = getattr(self.rotary, f"{_prefix(layer_type)}inv_freq").device
        return init(self.rotary.config, device, seq_len=length, layer_type=layer_type)[0]

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None):
        kind, prefix = _kinds(self.rotary)[layer_type], _prefix(layer_type)
        layer = () if layer_type is None else (layer_type,)
        if kind not in self.KINDS:
            return self.rotary(x, position_ids, *layer)
        length = position_ids[..., None] + 1
        if kind == "dynamic":
            frequencies = self._frequencies(layer_type, length)
        else:
            settings = self._settings(layer_type)
            is_long = length > settings["original_max_position_embeddings"]
            frequencies = torch.where(is_long, getattr(self, f"{prefix}long"), getattr(self, f"{prefix}short"))
            if "long_mscale" in settings:  # Phi-3.5-MoE
                angles = position_ids[..., None].float() * frequencies
                scaling = torch.where(is_long, settings["long_mscale"], settings["short_mscale"])
                return tuple((f(torch.cat((angles, angles), -1)) * scaling).to(x.dtype) for f in (torch.cos, torch.sin))
        # Without the decorator that updates the frequencies.
        forward = inspect.unwrap(type(self.rotary).forward)
        return forward(_WithAttribute(self.rotary, f"{prefix}inv_freq", frequencies), x, position_ids, *layer)


class _WithAttribute:
    """Stands for the object `whole`, one of whose attributes has another value."""

    def __init__(self, whole: Any, name: str, value: Any):
        self._whole = whole
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _kinds(rotary: torch.nn.Module) -> dict[str | None, str]:
    """Return the type of layers → the kind of its rotary embedding. The type is None if all layers have the same."""
    kinds = getattr(rotary, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {None: kinds}


def _prefix(layer_type: str | None) -> str:
    """Return the prefix of the names of the buffers for a type of layers."""
    return "" if layer_type is None else f"{layer_type}_"


def use_stateless_rotary(model: torch.nn.Module) -> None:
    """Replace each rotary embedding of `model` that keeps state, in place."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            is_replaced = isinstance(module, StatelessRotary)
            if not is_replaced and not set(StatelessRotary.KINDS).isdisjoint(_kinds(module).values()):
                setattr(parent, name, StatelessRotary(module))
