"""Elementwise nodes: the cases of irprograms/node_cases, and integer division by zero."""

import pytest
import torch
from irprograms import Graph, ir
from irprograms.node_case import INTS, check, parametrize
from irprograms.node_cases import elementwise


@parametrize(elementwise.CASES)
def test_node_matches_torch(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("node", [ir.FloorDivideNode, ir.RemainderNode])
def test_integer_division_by_zero_is_an_error(node, capfd):
    g = Graph()
    a, b = g.input((3,), torch.int32), g.input((3,), torch.int32)
    g.emit(node(a=a, b=b, out=g.output((3,), torch.int32)))
    model = g.load()
    ones = torch.ones(3, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        model(ones, torch.tensor([1, 0, 1], dtype=torch.int32))
    assert "integer division by zero" in capfd.readouterr().err
    assert torch.equal(model(ones, ones)[0], ones // ones if node is ir.FloorDivideNode else ones * 0)


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("node, op", [(ir.FloorDivideNode, torch.floor_divide), (ir.RemainderNode, torch.remainder)])
def test_division_by_computed_zero_is_zero(node, op, dtype):
    """The divisor is a result of the call, so the runtime cannot read it on the host and refuse it."""
    g = Graph()
    a, b, t = g.input((4,), dtype), g.input((4,), dtype), g.new_temp()
    zeros = g.constant(torch.zeros(4, dtype=dtype))
    g.emit(ir.AddNode(a=b, b=zeros, out=t), node(a=a, b=t, out=g.output((4,), dtype)))
    x = torch.tensor([7, 9, 100, 8]).to(dtype)
    y = torch.tensor([2, 0, 6, -1 if dtype.is_signed else 4]).to(dtype)
    (result,) = g.run(x, y)
    expected = op(x, torch.where(y == 0, 1, y))
    expected[1] = 0
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32], ids=str)
@pytest.mark.parametrize("node, op", [(ir.FloorDivideNode, torch.floor_divide), (ir.RemainderNode, torch.remainder)])
def test_largest_unsigned_divisor_is_not_minus_one(node, op, dtype):
    g = Graph()
    a, b, inverted, result = g.input((2,), torch.int32), g.input((2,), dtype), g.new_temp(), g.new_temp()
    g.emit(
        ir.BitwiseInvertNode(x=b, out=inverted),  # computed, as above
        node(a=a, b=inverted, out=result),
        ir.AsTypeNode(x=result, out=g.output((2,), torch.int64), scalar_type=4),
    )
    x = torch.tensor([10**6, -7], dtype=torch.int32)
    assert g.run(x, torch.zeros(2, dtype=dtype))[0].equal(op(x.long(), torch.iinfo(dtype).max))
