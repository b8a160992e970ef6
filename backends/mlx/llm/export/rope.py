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
    sines `[B, S, D]` in the dtype of `x`. `rotary` is the module of `transformers`.
    """

    KINDS = ("dynamic", "longrope")

    def __init__(self, rotary: torch.nn.Module):
        super().__init__()
        self.kind, self.config = rotary.rope_type, rotary.config
        self.scaling = rotary.attention_scaling
        self.original_length = self.config.rope_parameters.get("original_max_position_embeddings")
        if self.kind == "longrope":
            for name, length in (("short", self.original_length), ("long", self.original_length + 1)):
                self.register_buffer(name, self._frequencies(length), persistent=False)

    def _frequencies(self, length) -> torch.Tensor:
        """Return the frequencies for a context of `length` positions. A tensor `[B, S, 1]` gives `[B, S, D / 2]`."""
        return ROPE_INIT_FUNCTIONS[self.kind](self.config, torch.device("cpu"), seq_len=length)[0]

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor):
        length = position_ids[:, :, None] + 1
        if self.kind == "longrope":
            frequencies = torch.where(length > self.original_length, self.long, self.short)
        else:
            frequencies = self._frequencies(length)
        angles = position_ids[:, :, None].float() * frequencies.float()
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((f(angles) * self.scaling).to(x.dtype) for f in (torch.cos, torch.sin))


def use_stateless_rotary(model: torch.nn.Module) -> None:
    """Replace each rotary embedding of `model` that keeps state with a `StatelessRotary`, in place."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if getattr(module, "rope_type", None) in StatelessRotary.KINDS:
                setattr(parent, name, StatelessRotary(module))
