"""Lowers recurrent layers (LSTM, GRU, RNN) to `ScanNode`, one for each layer and direction.

The product of the inputs and the input weights is computed for all time steps at once, before the loop. Each step of
the loop multiplies the hidden state by the hidden weights and applies the cell. The number of steps may be dynamic.

torch's own rule for the shapes of its operators runs the cell once for every step, which makes the number of steps
static. They are therefore replaced by those of `custom_ops/recurrent_layers.py` first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import Space, TensorSlot
from ..custom_ops.recurrent_layers import RECURRENT_LAYERS
from ..serialization import ir
from .lib.loop import emit_scan

aten = torch.ops.aten


@dataclass(frozen=True)
class Weights:
    """The parameters of one direction of a layer.

    The matrices are those of torch, transposed: a step computes `x @ matrix`. The biases are None in a layer without
    biases. `projection` is None unless the layer is an LSTM with `proj_size`.
    """

    input: TensorSlot
    hidden: TensorSlot
    input_bias: TensorSlot | None = None
    hidden_bias: TensorSlot | None = None
    projection: TensorSlot | None = None


@dataclass(frozen=True)
class Cell:
    """A recurrent cell.

    `step(P, projected, state, weights)` emits one time step and returns the new state. `state` is a list of slots
    [B, H] whose first is the output of the cell. `projected` [B, G] is the product of the inputs and the input weights,
    plus the input bias; G is H times the number of gates. If `projected_has_hidden_bias`, it also includes the hidden
    bias.
    """

    step: Callable
    projected_has_hidden_bias: bool = True


# -- cells ----------------------------------------------------------------------


def _product(P, x, matrix, bias=None):
    return P.emit(ir.AddmmNode, mat1=x, mat2=matrix, bias=bias)


def _split_columns(P, x, count, width):
    """Split the last axis of `x` into `count` tensors of `width` columns."""
    outs = [TensorSlot(x.dtype) for _ in range(count)]
    return P.emit(ir.SplitNode, x=x, sizes=[width], axis=-1, outs=outs)


def _lstm_step(P, projected, state, weights):
    hidden, cell = state
    width = weights.hidden.shape[1] // 4
    gates = _product(P, hidden, weights.hidden, projected)
    # One sigmoid of all columns, including those of the candidate, costs less than one for each gate.
    input_gate, forget_gate, _, output_gate = _split_columns(P, P.emit(ir.SigmoidNode, x=gates), 4, width)
    candidate = P.emit(ir.TanhNode, x=_columns(P, gates, 2 * width, 3 * width))
    kept = P.emit(ir.MultiplyNode, a=forget_gate, b=cell)
    cell = P.emit(ir.AddNode, a=kept, b=P.emit(ir.MultiplyNode, a=input_gate, b=candidate))
    hidden = P.emit(ir.MultiplyNode, a=output_gate, b=P.emit(ir.TanhNode, x=cell))
    if weights.projection is not None:
        hidden = _product(P, hidden, weights.projection)
    return [hidden, cell]


def _gru_step(P, projected, state, weights):
    (hidden,) = state
    width = weights.hidden.shape[1] // 3
    recurrent = _product(P, hidden, weights.hidden, weights.hidden_bias)
    gates = P.emit(ir.AddNode, a=_columns(P, projected, 0, 2 * width), b=_columns(P, recurrent, 0, 2 * width))
    reset, update = _split_columns(P, P.emit(ir.SigmoidNode, x=gates), 2, width)
    gated = P.emit(ir.MultiplyNode, a=reset, b=_columns(P, recurrent, 2 * width, 3 * width))
    candidate = P.emit(ir.TanhNode, x=P.emit(ir.AddNode, a=_columns(P, projected, 2 * width, 3 * width), b=gated))
    # (1 - update) * candidate + update * hidden
    difference = P.emit(ir.SubtractNode, a=hidden, b=candidate)
    return [P.emit(ir.AddNode, a=candidate, b=P.emit(ir.MultiplyNode, a=update, b=difference))]


def _rnn_tanh_step(P, projected, state, weights):
    return [P.emit(ir.TanhNode, x=_product(P, state[0], weights.hidden, projected))]


def _rnn_relu_step(P, projected, state, weights):
    sums = _product(P, state[0], weights.hidden, projected)
    return [P.emit(ir.MaximumNode, a=sums, b=P.scalar(0, sums.dtype))]


def _columns(P, x, start, stop):
    return P.emit(ir.SliceNode, x=x, axis=-1, start=start, stop=stop)


# -- layers ---------------------------------------------------------------------


def _transposed(P, matrix):
    """Return `matrix` transposed. A float32 constant is stored transposed, with contiguous rows.

    The CPU kernels for float32 multiply the few rows of a time step fastest by such a matrix. The CPU kernels for half
    precision expect the matrix as torch stores it.
    """
    if matrix.space == Space.CONSTANT and matrix.dtype == torch.float32:
        return P.constant(
            f"{matrix.name}_transposed", lambda: matrix.data().T.contiguous(), matrix.shape[::-1], matrix.dtype
        )
    return P.emit(ir.TransposeNode, x=matrix, perm=[1, 0])


def _weights(P, params, has_biases):
    """Return the `Weights` of the tensors `params`, in torch's order: W_ih, W_hh, then b_ih, b_hh, then W_hr."""
    tensors = [_transposed(P, p) if p.ndim == 2 else p for p in params]
    biases = tensors[2:4] if has_biases else [None, None]
    projection = tensors[4 if has_biases else 2 :]
    return Weights(*tensors[:2], *biases, *projection)


def _scan(P, x, state, weights, cell, axis, reverse):
    """Emit the loop over `axis` of `x` for one direction of a layer.

    Returns the outputs of all steps, and the final state.
    """
    bias = weights.input_bias
    if bias is not None and cell.projected_has_hidden_bias:
        bias = P.emit(ir.AddNode, a=bias, b=weights.hidden_bias)
    projected = _product(P, x, weights.input, bias)
    if reverse:
        projected = P.emit(ir.FlipNode, x=projected, axes=[axis])

    def body(carry, slices):
        new = cell.step(P, *slices, carry, weights)
        return [*new, new[0]]

    output = TensorSlot(x.dtype)
    carry = emit_scan(P, body, state, [projected], [output], axis)
    return P.emit(ir.FlipNode, x=output, axes=[axis]) if reverse else output, carry


def _lower_layers(P, x, initial, params, has_biases, num_layers, bidirectional, batch_first, cell):
    """Lower all layers. `initial` is a list of states [layers * directions, B, H].

    Returns the outputs of the last layer, and the list of final states.
    """
    directions = 2 if bidirectional else 1
    count = len(params) // (num_layers * directions)
    finals = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            i = layer * directions + direction
            weights = _weights(P, params[i * count : (i + 1) * count], has_biases)
            state = [P.emit(ir.TakeNode, x=s, index=i, axis=0) for s in initial]
            output, final = _scan(P, x, state, weights, cell, 1 if batch_first else 0, direction == 1)
            outputs.append(output)
            finals.append(final)
        x = P.emit(ir.ConcatenateNode, tensors=outputs, axis=2) if bidirectional else outputs[0]
    states = [P.emit(ir.StackNode, tensors=list(s), axis=0) for s in zip(*finals, strict=True)]
    return x, states


def _lowering(cell):
    def lower(P, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        if train and dropout > 0 and num_layers > 1:
            raise Unsupported("training mode is unsupported; call eval() on the model before export")
        initial = hx if isinstance(hx, list) else [hx]
        output, states = _lower_layers(
            P, input, initial, params, has_biases, num_layers, bidirectional, batch_first, cell
        )
        return [output, *states]

    return lower


CELLS = {
    aten.lstm.input: Cell(_lstm_step),
    aten.gru.input: Cell(_gru_step, projected_has_hidden_bias=False),
    aten.rnn_tanh.input: Cell(_rnn_tanh_step),
    aten.rnn_relu.input: Cell(_rnn_relu_step),
}

for _target, _layer in RECURRENT_LAYERS.items():
    REGISTRY.decompose(_target, _layer)
    REGISTRY.add(_layer, _lowering(CELLS[_target]))
