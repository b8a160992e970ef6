"""LSTM, GRU and RNN: layers and cells."""

from contextlib import nullcontext

import pytest
import torch
from executorch_mlx import MLXPartitioner, dynamic_steps
from oprows import Dyn, f32, floats, pytest_function, row
from torch import nn
from torch._dynamo.exc import UserError

SCAN = {"nodes": ["ScanNode"], "loose": 3, "loose_half": 4}
SCAN_F32 = {"dtypes": (f32,), **SCAN}
T = Dyn("t", 5, also=(1, 9))


def with_state(layer):
    """Return a module that takes the initial state as further inputs: h for GRU and RNN, h and c for LSTM."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, *state):
            return self.layer(x, state if len(state) == 2 else state[0])

    return Layer()


def lstm(*args, **kwargs):
    return nn.LSTM(6, 4, *args, **kwargs)


ROWS = [
    row("lstm.input", lstm(), floats(5, 2, 6), **SCAN),
    row("lstm.input/dynamic", lstm(num_layers=2, batch_first=True), floats(2, T, 6), **SCAN_F32),
    row("lstm.input/bidirectional", lstm(2, bidirectional=True), floats(T, 2, 6), **SCAN_F32),
    row(
        "lstm.input/bidirectional, batch first",
        lstm(2, bidirectional=True, batch_first=True),
        floats(2, 3, 6),
        **SCAN_F32,
    ),
    row("lstm.input/no bias", lstm(bias=False), floats(5, 2, 6), **SCAN_F32),
    row("lstm.input/projection", lstm(2, proj_size=3, bidirectional=True), floats(5, 2, 6), **SCAN_F32),
    row("lstm.input/projection, no bias", lstm(proj_size=3, bias=False), floats(5, 2, 6), **SCAN_F32),
    row("lstm.input/state", with_state(lstm(2)), floats(5, 3, 6), floats(2, 3, 4), floats(2, 3, 4), **SCAN_F32),
    row("lstm.input/unbatched", with_state(lstm()), floats(5, 6), floats(1, 4), floats(1, 4), **SCAN_F32),
    row("lstm.input/dropout", lstm(2, dropout=0.5), floats(5, 2, 6), **SCAN_F32),
    row("gru.input", nn.GRU(6, 4), floats(5, 2, 6), **SCAN),
    row("gru.input/bidirectional", nn.GRU(6, 4, 2, bidirectional=True, batch_first=True), floats(2, T, 6), **SCAN_F32),
    row("gru.input/no bias", nn.GRU(6, 4, bias=False), floats(5, 2, 6), **SCAN_F32),
    row("gru.input/state", with_state(nn.GRU(6, 4, 2)), floats(5, 3, 6), floats(2, 3, 4), **SCAN_F32),
    row("gru.input/unbatched", with_state(nn.GRU(6, 4)), floats(5, 6), floats(1, 4), **SCAN_F32),
    row("rnn_tanh.input", nn.RNN(6, 4, 2, bidirectional=True), floats(T, 2, 6), **SCAN_F32),
    row(
        "rnn_relu.input",
        with_state(nn.RNN(6, 4, nonlinearity="relu", batch_first=True)),
        floats(2, 5, 6),
        floats(1, 2, 4),
        signed_zero=False,
        **SCAN,
    ),
    row("program/lstm cell", nn.LSTMCell(6, 4), floats(2, 6), dtypes=(f32,)),
    row("program/gru cell", nn.GRUCell(6, 4), floats(2, 6), floats(2, 4), dtypes=(f32,)),
    row("program/rnn cell", nn.RNNCell(6, 4, nonlinearity="relu"), floats(6), dtypes=(f32,), signed_zero=False),
]

test_op_row = pytest_function(ROWS)


@pytest.mark.parametrize("rule", [nullcontext, dynamic_steps])
def test_torch_still_decomposes_a_layer(rule):
    with rule():
        program = torch.export.export(nn.GRU(6, 4).eval(), (torch.zeros(5, 2, 6),))
        decomposed = program.run_decompositions()
    targets = {str(n.target) for n in decomposed.graph.nodes}
    assert "aten.gru.input" not in targets and "aten.addmm.default" in targets
    x = torch.randn(5, 2, 6)
    torch.testing.assert_close(decomposed.module()(x), program.module()(x))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_number_of_steps_is_dynamic_in_the_context_only(layer):
    shapes, example = ({0: torch.export.Dim("steps")},), (torch.zeros(5, 2, 6),)
    with dynamic_steps():
        program = torch.export.export(layer(6, 4).eval(), example, dynamic_shapes=shapes)
    assert program.module()(torch.zeros(9, 2, 6))[0].shape == (9, 2, 4)
    with pytest.raises(UserError, match="specialized"):
        torch.export.export(layer(6, 4).eval(), example, dynamic_shapes=shapes)


def test_layer_that_is_not_delegated_stays_that_of_torch():
    layer = nn.LSTM(6, 4, num_layers=2, dropout=0.5)
    partitioner = MLXPartitioner()
    program = partitioner.transform_for_pre_decomposition(torch.export.export(layer, (torch.zeros(5, 2, 6),)))
    assert "aten.lstm.input" in {str(n.target) for n in program.graph.nodes}
