"""Reductions and sorts: the cases of irprograms/node_cases, partition, and invalid axes."""

import pytest
import torch
from irprograms import Graph, ir, lit
from irprograms.node_case import check, parametrize, random
from irprograms.node_cases import reduce

X = random(2, 3, 4)
UINT = torch.uint32


@parametrize(reduce.CASES)
def test_node_matches_torch(case, dtype):
    check(case, dtype)


def test_partition_splits_at_kth():
    x = random(3, 50)
    g = Graph()
    a = g.input((3, 50))
    values, indices = g.output((3, 50)), g.output((3, 50), UINT)
    g.emit(
        ir.PartitionNode(x=a, out=values, kth=lit(10), axis=-1),
        ir.ArgPartitionNode(x=a, out=indices, kth=lit(-40), axis=1),
    )
    partitioned, order = g.run(x)
    expected = x.sort(-1).values
    for result in (partitioned, x.gather(-1, order.to(torch.int64))):
        assert torch.equal(result[:, 10], expected[:, 10])
        assert torch.equal(result[:, :10].sort(-1).values, expected[:, :10])
        assert torch.equal(result[:, 11:].sort(-1).values, expected[:, 11:])


@pytest.mark.parametrize(
    "node, fields, message",
    [
        (ir.SumNode, {"axes": [3]}, "axis 3 is out of range [-3, 3)"),
        (ir.SumNode, {"axes": [1, -2]}, "axis -2 is listed twice"),
        (ir.ArgmaxNode, {"axis": -4}, "axis -4 is out of range [-3, 3)"),
        (ir.PartitionNode, {"axis": 0, "kth": lit(2)}, "kth 2 is out of range [-2, 2)"),
    ],
)
def test_invalid_axes_are_errors(node, fields, message, capfd):
    g = Graph()
    g.emit(node(x=g.input((2, 3, 4)), out=g.output((2, 3, 4)), **fields))
    with pytest.raises(RuntimeError):
        g.run(X)
    assert f"chain 0, instruction 0 ({node.NAME}): {message}" in capfd.readouterr().err
