"""`Matcher` collects the nodes of a match, and no others."""

import torch
from executorch_mlx.builder.matcher import Matcher, is_call

MUL, SIGMOID = "aten.mul.Tensor", "aten.sigmoid.default"


class TwoGates(torch.nn.Module):
    def forward(self, x):
        gate = torch.sigmoid(x)
        return torch.sigmoid(gate) * gate


def test_the_second_order_begins_without_the_nodes_of_the_first():
    """The gate of the first order is no part of the match that the second order finds."""
    nodes = [*torch.export.export(TwoGates(), (torch.randn(2),)).graph.nodes]
    gate, gate_of_gate, product = (n for n in nodes if is_call(n, MUL, SIGMOID))
    m = Matcher(None)
    added = []
    for _, factor in m.commuted(product, MUL):
        m.arguments(factor, [SIGMOID], "self")
        added.append(list(m.nodes))
    assert added == [[product, gate], [product, gate_of_gate]]
