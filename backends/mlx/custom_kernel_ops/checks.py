"""Checks of the arguments of operators on logits. Each raises ValueError with the operator and the argument."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def is_per_row(parameter):
    """Whether `parameter` has a value for each sequence. True for a dynamic size, even if it is 1 at run time."""
    if parameter is None or parameter.dim() == 0:
        return False
    return not isinstance(parameter.shape[0], int) or parameter.shape[0] != 1


def fits_rows(parameter, batch):
    """Whether `parameter` has one element, or the shape `[batch]`."""
    return parameter.shape == (batch,) if is_per_row(parameter) else parameter.numel() == 1


def check_logits(name, logits):
    """Raise ValueError unless `logits` are float32, float16 or bfloat16 `[B, V]` with V >= 1."""
    if logits.dim() != 2 or logits.dtype not in FLOATS:
        raise ValueError(
            f"mlx::{name}: logits: got {describe(logits)}, expected float32, float16 or bfloat16 of shape [B, V]"
        )
    if logits.shape[1] == 0:
        raise ValueError(f"mlx::{name}: logits: got an empty vocabulary, expected V >= 1")


def describe(x):
    """Return the dtype and the shape of a tensor as text, for errors."""
    return f"{x.dtype} of shape {list(x.shape)}"
