"""Which programs can be replayed at another position: the runtime decides this at load, so no GPU is needed."""

import os
import subprocess
import sys

import pytest
import torch
from irprograms import Graph, ir, lit, value_of
from irprograms.graph import INT32

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernels for CUDA are built on Linux only"),
    pytest.mark.skipif("EXECUTORCH_MLX_BUILD" in os.environ, reason="only build/ has the program cuda_kernel_sources"),
]
D, CAPACITY = 8, 16


class Step(Graph):
    """Attention of a token to a KV cache, with the options of its instructions."""

    def __init__(self, item=None, offset=None, start=None, stop=None, first=None, mask=None, axis=2):
        super().__init__()
        self.x = self.input((1, 1, 1, D))
        self.position = self.input((1,), torch.int64)
        self.names[self.position.idx] = "input_pos"
        self.other = self.input((1,), torch.int64)
        number = self.new_temp()
        self.emit(ir.ReshapeNode(x=self.position, out=number, shape=[]))
        q = self.new_temp()
        self.emit(ir.RopeNode(x=self.x, out=q, dims=D, offset=ir.VidOrTid(tid=offset or number)))
        at = self.item(item or self.position)
        end = self.sum(at, 1)
        cache = self.buffer((1, 1, CAPACITY, D))
        update = {"start": start or value_of(at), "stop": stop or value_of(end)}
        self.emit(ir.SliceUpdateNode(dst=cache, update=self.x, out=cache, axis=lit(axis), **update))
        k, self.y = self.new_temp(), self.output((1, 1, 1, D))
        self.emit(ir.SliceNode(x=cache, out=k, axis=lit(2), start=first or lit(0), stop=value_of(end)))
        self.emit(ir.SdpaNode(q=q, k=k, v=k, out=self.y, scale=1.0, mask=mask))
        self.at, self.k, self.number = at, k, number

    def sum(self, vid, n):
        out = self.new_value()
        self.emit(ir.AddIntNode(a=value_of(vid), b=lit(n), out=out))
        return out


@pytest.fixture(scope="module")
def position(cuda_kernel_sources, tmp_path_factory):
    """A function that returns how a graph depends on the position."""
    path = tmp_path_factory.mktemp("position") / "payload"

    def position(graph):
        path.write_bytes(graph.payload())
        return subprocess.check_output([cuda_kernel_sources, "--position", path], text=True).strip()

    return position


def test_a_step(position):
    assert position(Step()) == "2 instructions, 1 starts, 2 stops, 1 places"


def test_arithmetic_with_the_position_alone(position):
    g = Step()
    g.sum(g.sum(g.at, 3), 1)
    assert position(g) == "4 instructions, 1 starts, 2 stops, 1 places"


def other(g):
    """Reads an element of another input on the host."""
    g.item(g.other)


def number_of_position(g):
    """A tensor of the position in other operations."""
    g.emit(ir.AddNode(a=g.number, b=g.number, out=g.new_temp()))


def length_of_keys(g):
    """The number of positions is the size of a tensor."""
    g.emit(ir.SymSizeNode(a=g.k, dim=2, out=g.new_value()))


def sum_of_keys(g):
    g.emit(ir.SumNode(x=g.k, out=g.new_temp(), axes=[2]))


def shape_of_position(g):
    g.emit(ir.ReshapeNode(x=g.x, out=g.new_temp(), shape=[value_of(g.at), lit(D)]))


def element_at_position(g):
    g.emit(ir.TakeNode(x=g.constant(torch.ones(CAPACITY, D)), out=g.new_temp(), axis=0, index=index_of(g.position)))


def branch(g):
    g.emit(ir.IfNode(cond=value_of(g.at), then_chain_idx=g.chain(), else_chain_idx=g.chain()))


def index_of(tid):
    return ir.IntOrVidOrTid(tid=tid, kind=2)


@pytest.mark.parametrize(
    "add", [other, number_of_position, length_of_keys, sum_of_keys, shape_of_position, element_at_position, branch]
)
def test_a_further_use(position, add):
    g = Step()
    add(g)
    assert position(g) == "none"


@pytest.mark.parametrize(
    "options", [{"start": lit(3)}, {"stop": lit(4)}, {"axis": 1}], ids=lambda options: [*options][0]
)
def test_another_place(position, options):
    assert position(Step(**options)) == "none"


def test_a_row_of_the_cache(position):
    """An exported program checks the row and the position: it reads an element of a range."""

    class Row(Step):
        def item(self, tid):
            numbers, number = self.new_temp(), self.new_temp()
            self.emit(ir.ARangeNode(out=numbers, start=lit(0), stop=lit(CAPACITY), step=lit(1), scalar_type=INT32))
            self.emit(ir.GatherNode(x=numbers, indices=[tid], axes=[0], slice_sizes=[1], out=number))
            row = super().item(number)
            again = self.new_temp()
            self.emit(ir.TakeNode(x=numbers, out=again, axis=0, index=ir.IntOrVidOrTid(vid=row, kind=1)))
            return super().item(again)

    assert position(Row()) == "6 instructions, 1 starts, 2 stops, 1 places"
    g = Row()
    g.item(g.other)  # the row of a request
    assert position(g) == "11 instructions, 1 starts, 2 stops, 1 places"


def test_a_program_without_positions(position):
    g = Graph()
    x, y = g.input((1, D)), g.output((1, D))
    g.emit(ir.SiluNode(x=x, out=y))
    assert position(g) == "none"
