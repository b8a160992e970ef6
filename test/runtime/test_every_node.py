"""Every IR node of ExecuTorch's own MLX delegate has a test in this folder. Extensions have op rows in test/ops."""

import pytest
from irprograms import Graph, ir, lits
from irprograms.node_cases import CASES

REFUSED = {ir.MetalKernelNode}

# Nodes that need more than one case: see the other files of this folder.
TESTED_WITHOUT_CASE = {
    ir.ARangeNode,
    ir.FullNode,
    ir.FullLikeNode,
    ir.TriNode,
    ir.TrilNode,
    ir.TriuNode,
    ir.AddIntNode,
    ir.SubtractIntNode,
    ir.MultiplyIntNode,
    ir.FloorDivideIntNode,
    ir.ModIntNode,
    ir.ItemIntNode,
    ir.SymSizeNode,
    ir.RandomBitsNode,
    ir.IfNode,
    ir.ScanNode,
    ir.NoopNode,
    ir.PartitionNode,
    ir.ArgPartitionNode,
    ir.RopeNode,
    ir.UpdateAndAttendNode,
}


def test_every_node_has_a_test():
    tested = TESTED_WITHOUT_CASE | {case.node for case in CASES}
    official = {op for op in ir.OPS.values() if op.OP_TYPE < ir.FIRST_EXTENSION}
    assert official - tested == REFUSED


def test_metal_kernels_are_refused(capfd):
    g = Graph()
    g.emit(
        ir.MetalKernelNode(name="k", source="", inputs=[], outputs=[g.output((1,))], grid=lits(1), threadgroup=lits(1))
    )
    with pytest.raises(RuntimeError, match="0x:?10"):
        g.load()
    assert "instruction 0 (MetalKernelNode)" in capfd.readouterr().err


@pytest.mark.parametrize("node, axis", [(ir.AllSumNode, {}), (ir.AllGatherNode, {"axis": 0})])
def test_a_part_of_a_model_of_an_earlier_version_is_refused(node, axis, capfd):
    g = Graph()
    g.emit(node(x=g.input((2,)), out=g.output((2,)), rank=0, size=1, **axis))
    with pytest.raises(RuntimeError, match="0x:?10"):
        g.load()
    assert f"instruction 0 ({node.__name__}): the program is a part of a model" in capfd.readouterr().err
