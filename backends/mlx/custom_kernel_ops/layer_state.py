"""`mlx::read_layer_state` and `mlx::causal_conv1d`, for layers that keep a state in place of keys and values."""

from __future__ import annotations

import torch

from ..custom_ops.library import define


def read_layer_state_definition(states, start, row=None, rows=1):
    """Return the states of B rows, `[B, N]`. The comment above `read_layer_state` explains the arguments."""
    held = states.reshape(rows, -1)
    if row is not None:
        held = held[row]
    return torch.where((start == 0).unsqueeze(1), torch.zeros_like(held), held)


def causal_conv1d_definition(x, weight, bias=None):
    """Return the convolution `[B, D, S]`, in the dtype of `weight`.

    An output has the same bits however many tokens S a call takes, because the taps are added in a fixed order.
    """
    batch, channels, length = x.shape
    taps = weight.shape[1]
    padded = torch.cat([torch.zeros(batch, channels, taps - 1, dtype=x.dtype), x], 2).to(weight.dtype)
    out = padded[:, :, :length] * weight[:, 0, None]
    for tap in range(1, taps):
        out = out + padded[:, :, tap : tap + length] * weight[:, tap, None]
    return out if bias is None else out + bias[:, None]


def _check_state(states, start, row=None, rows=1):
    if (row is None) != (rows == 1) or states.dim() != 4 or states.shape[:3] != (1, 1, rows):
        raise ValueError(
            f"mlx::read_layer_state: got states {list(states.shape)}, {'no row' if row is None else 'row'} and {rows} "
            f"rows, expected states [1, 1, {rows}, N], and row if there are several rows"
        )


def _read_layer_state(states, start, row=None, rows=1):
    _check_state(states, start, row, rows)
    if row is not None and not 0 <= int(row.min()) <= int(row.max()) < rows:
        raise ValueError(f"mlx::read_layer_state: row: got {row.tolist()}, expected rows in [0, {rows})")
    return read_layer_state_definition(states, start, row, rows)


def _fake_read(states, start, row=None, rows=1):
    _check_state(states, start, row, rows)
    return states.new_empty(start.shape[0], states.shape[3])


def _check_conv(x, weight, bias=None):
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(
            f"mlx::causal_conv1d: got x {list(x.shape)} and weight {list(weight.shape)}, expected [B, D, S] and [D, K]"
        )


def _causal_conv1d(x, weight, bias=None):
    _check_conv(x, weight, bias)
    return causal_conv1d_definition(x, weight, bias)


def _fake_conv(x, weight, bias=None):
    _check_conv(x, weight, bias)
    return x.new_empty(x.shape, dtype=weight.dtype)


# Copies the states of B rows from the buffer `states` [1, 1, rows, N]. `row` int64 [B] is None if there is one row. The
# next token of a row is at the position in `start` int64 [B]; at position 0, the state is zero.
read_layer_state = define(
    "read_layer_state(Tensor states, Tensor start, Tensor? row=None, int rows=1) -> Tensor",
    _read_layer_state,
    _fake_read,
)

# A convolution of each channel of `x` [B, D, S] with its row of `weight` [D, K]. Output s is computed from the inputs
# s - K + 1 to s; inputs before the first one are zero. `bias` is [D].
causal_conv1d = define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _causal_conv1d, _fake_conv
)

COMPOSITES = {read_layer_state: read_layer_state_definition, causal_conv1d: causal_conv1d_definition}
