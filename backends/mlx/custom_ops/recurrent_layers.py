"""Recurrent layers as operators: torch's `lstm`, `gru`, `rnn_tanh` and `rnn_relu`, with a rule for their shapes.

torch runs the cell once for each time step to find the shapes of the results, which makes the number of steps static.
The partitioner therefore replaces torch's operators by these, which compute the same.
"""

from __future__ import annotations

import torch

from .library import define

aten = torch.ops.aten

_OPTIONS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)


def result_shapes(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
    """Return empty tensors with the shapes of the results of a layer: the outputs, and the final states."""
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return input.new_empty((*input.shape[:2], width)), *(torch.empty_like(s) for s in states)


# torch's operator → the one of this package.
RECURRENT_LAYERS = {
    aten.lstm.input: define(
        f"lstm(Tensor input, Tensor[] hx, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", aten.lstm.input, result_shapes
    ),
    **{
        target: define(f"{name}(Tensor input, Tensor hx, {_OPTIONS}) -> (Tensor, Tensor)", target, result_shapes)
        for name, target in (
            ("gru", aten.gru.input),
            ("rnn_tanh", aten.rnn_tanh.input),
            ("rnn_relu", aten.rnn_relu.input),
        )
    },
}
