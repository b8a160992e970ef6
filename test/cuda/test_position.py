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
    """Attention of a token to a KV cache, with the options of its instructions. `before` adds instructions."""

    def __init__(self, item=None, offset=None, start=None, stop=None, first=None, mask=None, axis=2, before=None):
        super().__init__()
        self.x = self.input((1, 1, 1, D))
        self.position = self.input((1,), torch.int64)
        self.names[self.position.idx] = "input_pos"
        self.other = self.input((1,), torch.int64)
        self.number = self.new_temp()
        self.emit(ir.ReshapeNode(x=self.position, out=self.number, shape=[]))
        q = self.new_temp()
        self.emit(ir.RopeNode(x=self.x, out=q, dims=D, offset=ir.VidOrTid(tid=offset or self.number)))
        self.at = self.item(item or self.position)
        end = self.sum(self.at, 1)
        if before is not None:
            before(self)
        cache = self.buffer((1, 1, CAPACITY, D))
        update = {"start": start or value_of(self.at), "stop": stop or value_of(end)}
        self.emit(ir.SliceUpdateNode(dst=cache, update=self.x, out=cache, axis=lit(axis), **update))
        self.k, self.y = self.new_temp(), self.output((1, 1, 1, D))
        self.emit(ir.SliceNode(x=cache, out=self.k, axis=lit(2), start=first or lit(0), stop=value_of(end)))
        self.emit(ir.SdpaNode(q=q, k=self.k, v=self.k, out=self.y, scale=1.0, mask=mask))

    def sum(self, vid, n):
        out = self.new_value()
        self.emit(ir.AddIntNode(a=value_of(vid), b=lit(n), out=out))
        return out


STEP = "7 instructions, 2 for numbers, 1 rows, 1 updates"


@pytest.fixture(scope="module")
def position(cuda_kernel_sources, tmp_path_factory):
    """A function that returns how a graph depends on the position."""
    path = tmp_path_factory.mktemp("position") / "payload"

    def position(graph):
        path.write_bytes(graph.payload())
        return subprocess.check_output([cuda_kernel_sources, "--position", path], text=True).strip()

    return position


def test_a_step(position):
    assert position(Step()) == STEP


def test_arithmetic_with_the_position_alone(position):
    g = Step(before=lambda g: g.sum(g.sum(g.at, 3), 1))
    assert position(g) == "9 instructions, 4 for numbers, 1 rows, 1 updates"


def other(g):
    """Reads an element of another input on the host."""
    g.item(g.other)


def number_of_position(g):
    """A tensor of the position in other operations."""
    g.emit(ir.AddNode(a=g.number, b=g.number, out=g.new_temp()))


def shape_of_position(g):
    g.emit(ir.ReshapeNode(x=g.x, out=g.new_temp(), shape=[value_of(g.at), lit(D)]))


def element_at_position(g):
    g.emit(ir.TakeNode(x=g.constant(torch.ones(CAPACITY, D)), out=g.new_temp(), axis=0, index=index_of(g.position)))


def branch(g):
    g.emit(ir.IfNode(cond=value_of(g.at), then_chain_idx=g.chain(), else_chain_idx=g.chain()))


def index_of(tid):
    return ir.IntOrVidOrTid(tid=tid, kind=2)


@pytest.mark.parametrize("add", [other, number_of_position, shape_of_position, element_at_position, branch])
def test_a_further_use(position, add):
    assert position(Step(before=add)) == "none"
    g = Step()
    add(g)
    assert position(g) == STEP  # the interpreter runs what follows


def length_of_keys(g):
    """The number of positions is the size of a tensor."""
    g.emit(ir.SymSizeNode(a=g.k, dim=2, out=g.new_value()))


def sum_of_keys(g):
    g.emit(ir.SumNode(x=g.k, out=g.new_temp(), axes=[2]))


@pytest.mark.parametrize("add", [length_of_keys, sum_of_keys])
def test_a_use_of_the_keys(position, add):
    g = Step()
    add(g)
    g.emit(ir.SiluNode(x=g.y, out=g.new_temp()))
    assert position(g) == STEP


def test_the_longest_beginning(position):
    g = Step()
    y, z = g.new_temp(), g.new_temp()
    g.emit(ir.SiluNode(x=g.y, out=y))
    g.emit(ir.ReshapeNode(x=y, out=z, shape=[lit(D)]))  # no kernel
    branch(g)
    assert position(g) == STEP.replace("7", "8")


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

    assert position(Row()) == "11 instructions, 6 for numbers, 1 rows, 1 updates"
    g = Row(before=lambda g: g.item(g.other))  # the row of a request
    assert position(g) == "16 instructions, 11 for numbers, 1 rows, 1 updates"


class Rows(Graph):
    """A token for each row of a KV cache."""

    def __init__(self, count, stops=None):
        super().__init__()
        x = self.input((1, 1, count, D))
        positions = self.input((count,), torch.int64)
        self.names[positions.idx] = "input_pos"
        numbers, all_of_them = self.new_temp(), self.new_temp()
        self.emit(ir.ARangeNode(out=numbers, start=lit(0), stop=lit(CAPACITY), step=lit(1), scalar_type=INT32))
        self.emit(ir.GatherNode(x=numbers, indices=[positions], axes=[0], slice_sizes=[1], out=all_of_them))
        at, ends = [], []
        for i in range(count):
            number, end = self.new_temp(), self.new_value()
            self.emit(ir.TakeNode(x=all_of_them, out=number, axis=0, index=ir.IntOrVidOrTid(literal=i, kind=0)))
            at.append(value_of(self.item(number)))
            self.emit(ir.AddIntNode(a=at[-1], b=lit(1), out=end))
            ends.append(value_of(end))
        cache, y = self.buffer((1, 1, count * CAPACITY, D)), self.output((1, 1, count, D))
        self.emit(ir.RowUpdateNode(dst=cache, update=x, out=cache, starts=at))
        first = [lit(0)] * count
        self.emit(ir.RowSdpaNode(q=x, k=cache, v=cache, out=y, scale=1.0, starts=first, stops=stops or ends, masks=[]))


def test_a_token_of_each_row(position):
    assert position(Rows(3)) == "13 instructions, 11 for numbers, 3 rows, 1 updates"
    assert position(Rows(3, stops=[lit(4)] * 3)) == "none"


def test_a_program_without_positions(position):
    g = Graph()
    x, y = g.input((1, D)), g.output((1, D))
    g.emit(ir.SiluNode(x=x, out=y))
    assert position(g) == "none"
