"""Rotary embeddings whose frequencies depend on the position."""

from __future__ import annotations

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class StatelessRotary(torch.nn.Module):
    """A rotary embedding of kind `dynamic` or `longrope`, computed from the positions alone.

    The modules of `transformers` for these kinds take the frequencies for the largest position of the call, and keep
    them in a Python attribute. An exported program has no such state, and its results must not depend on the other
    tokens of a call. This module therefore takes the frequencies of each token for the position of the token, as
    `transformers` does if it gets one token in each call. `forward(x, position_ids [B, S])` returns the cosines and
    sines `[B, S, D]` in the dtype of `x`. `rotary` is the module of `transformers`, and `layer_type` the type of the
    layers, if each type has parameters of its own.

    Phi-3.5-MoE also has a factor for the cosines and sines, which depends on the position. Beyond the original length,
    this module takes the frequencies for long contexts, like Microsoft's code; that of `transformers` keeps the others.
    """

    KINDS = ("dynamic", "longrope")

    def __init__(self, rotary: torch.nn.Module, layer_type: str | None = None):
        super().__init__()
        self.config, self.layer_type = rotary.config, layer_type
        parameters, prefix = self.config.rope_parameters, ""
        if layer_type is not None:
            parameters, prefix = parameters[layer_type], f"{layer_type}_"
        self.kind = parameters["rope_type"]
        scaling = getattr(rotary, f"{prefix}attention_scaling")
        self.short_scaling = parameters.get("short_mscale", scaling)
        self.long_scaling = parameters.get("long_mscale", scaling)
        self.original_length = parameters.get("original_max_position_embeddings")
        if self.kind == "longrope":
            for name, length in (("short", self.original_length), ("long", self.original_length + 1)):
                self.register_buffer(name, self._frequencies(length), persistent=False)

    def _frequencies(self, length) -> torch.Tensor:
        """Return the frequencies for a context of `length` positions. A tensor `[B, S, 1]` gives `[B, S, D / 2]`."""
        init = ROPE_INIT_FUNCTIONS[self.kind]
        return init(self.config, torch.device("cpu"), seq_len=length, layer_type=self.layer_type)[0]

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor):
        length = position_ids[:, :, None] + 1
        scaling = self.short_scaling
        if self.kind == "longrope":
            is_long = length > self.original_length
            frequencies = torch.where(is_long, self.long, self.short)
            if self.long_scaling != self.short_scaling:
                scaling = torch.where(is_long, self.long_scaling, self.short_scaling)
        else:
            frequencies = self._frequencies(length)
        angles = position_ids[:, :, None].float() * frequencies.float()
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((f(angles) * scaling).to(x.dtype) for f in (torch.cos, torch.sin))


class RotaryByLayerType(torch.nn.Module):
    """The rotary embedding `rotary` with a `StatelessRotary` for each type of layers for which it keeps state."""

    def __init__(self, rotary: torch.nn.Module):
        super().__init__()
        self.rotary = rotary
        kept = [name for name, kind in rotary.rope_type.items() if kind in StatelessRotary.KINDS]
        self.stateless = torch.nn.ModuleDict({name: StatelessRotary(rotary, name) for name in kept})

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str):
        if layer_type in self.stateless:
            return self.stateless[layer_type](x, position_ids)
        return self.rotary(x, position_ids, layer_type)


def use_stateless_rotary(model: torch.nn.Module) -> None:
    """Replace each rotary embedding of `model` that keeps state, in place."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            kinds = getattr(module, "rope_type", None)
            if isinstance(kinds, dict):
                if not set(StatelessRotary.KINDS).isdisjoint(kinds.values()):
                    setattr(parent, name, RotaryByLayerType(module))
            elif kinds in StatelessRotary.KINDS:
                setattr(parent, name, StatelessRotary(module))
