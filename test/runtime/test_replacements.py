"""Replacements: the runtime runs one instruction in place of several."""

import pytest
import torch
from executorch_mlx.serialization.listing import list_replacements
from irprograms import Graph, ir, value_of

X = torch.tensor([1.0, -2.0, 3.0])


def doubled_and_squared() -> tuple[Graph, ir.Tid, ir.Tid]:
    """Return a program that computes (x + x) ** 2 in instructions 0 and 1 of its main chain, x and the result."""
    graph = Graph()
    x, t, y = graph.input((3,)), graph.new_temp(), graph.output((3,))
    graph.emit(ir.AddNode(a=x, b=x, out=t), ir.MultiplyNode(a=t, b=t, out=y))
    return graph, x, y


def test_the_replacement_runs():
    graph, x, y = doubled_and_squared()
    assert graph.run(X)[0].equal(4 * X * X)
    # Another function, so that the result shows which instructions ran.
    graph.replacements = [(0, 0, 2, ir.NegNode(x=x, out=y))]
    assert graph.run(X)[0].equal(-X)


def test_several_replacements_in_any_order():
    graph, x, y = doubled_and_squared()
    z, t = graph.output((3,)), graph.new_temp()
    graph.emit(ir.AddNode(a=y, b=x, out=t), ir.AbsNode(x=t, out=t), ir.ExpNode(x=t, out=z))
    graph.replacements = [(0, 3, 2, ir.NegNode(x=t, out=z)), (0, 0, 2, ir.NegNode(x=x, out=y))]
    assert [out.tolist() for out in graph.run(2 * X)] == [(-2 * X).tolist(), [0.0] * 3]


def test_a_replacement_in_a_branch():
    graph = Graph()
    x, y = graph.input((3,)), graph.output((3,))
    condition = graph.item(graph.input((), torch.int64))
    then = graph.chain(ir.AbsNode(x=x, out=y), ir.NegNode(x=y, out=y))
    graph.emit(
        ir.IfNode(cond=value_of(condition), then_chain_idx=then, else_chain_idx=graph.chain(ir.ExpNode(x=x, out=y)))
    )
    graph.replacements = [(then, 0, 2, ir.AbsNode(x=x, out=y))]
    run = graph.load()
    assert run(X, torch.tensor(1))[0].equal(X.abs())
    assert run(X, torch.tensor(0))[0].allclose(X.exp())


def test_messages_count_instructions_as_the_file_does(capfd):
    graph, x, y = doubled_and_squared()
    graph.emit(ir.ReshapeNode(x=y, shape=[ir.IntOrVid(literal=7)], out=graph.output((7,))))
    graph.replacements = [(0, 0, 2, ir.NegNode(x=x, out=y))]
    with pytest.raises(RuntimeError):
        graph.run(X)
    assert "chain 0, instruction 2 (ReshapeNode)" in capfd.readouterr().err


@pytest.mark.parametrize(
    "ranges, message",
    {
        "chain": ([(1, 0, 1)], "replacement: chain 1 is out of range [0, 1)"),
        "empty": ([(0, 1, 0)], "replacement: got instructions 1 to 1 of chain 0, which has 2"),
        "past the end": ([(0, 1, 2)], "replacement: got instructions 1 to 3 of chain 0, which has 2"),
        "overflow": ([(0, 2**32 - 1, 2**32 - 1)], "replacement: got instructions 4294967295 to 8589934590"),
        "overlap": ([(0, 1, 1), (0, 0, 2)], "replacement: instruction 1 of chain 0 has two replacements"),
    }.values(),
    ids=["chain", "empty", "past the end", "overflow", "overlap"],
)
def test_wrong_ranges_are_refused(ranges, message, capfd):
    graph, x, y = doubled_and_squared()
    graph.replacements = [(*range_, ir.NegNode(x=x, out=y)) for range_ in ranges]
    with pytest.raises(RuntimeError):
        graph.load()
    assert message in capfd.readouterr().err


def test_slots_of_replacements_are_verified(capfd):
    graph, x, _ = doubled_and_squared()
    graph.replacements = [(0, 0, 2, ir.NegNode(x=x, out=x))]
    with pytest.raises(RuntimeError):
        graph.load()
    assert "instruction 0 (NegNode): out: tensor slot 0 is an input and cannot be written" in capfd.readouterr().err


def test_listing():
    graph, x, y = doubled_and_squared()
    graph.replacements = [(0, 0, 2, ir.NegNode(x=x, out=y))]
    ((instruction, count),) = list_replacements(graph.graph())
    assert (instruction.op, instruction.chain, instruction.index, count) == ("Neg", 0, 0, 2)
