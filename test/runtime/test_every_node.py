"""Every official node has a test that runs it, but for the one that needs an Apple GPU; nodes of
ours have rows in test/ops."""

import pytest
import test_node_elementwise
import test_node_index
import test_node_nn
import test_node_reduce
import test_node_shape
from executorch_mlx.serialization.generate import FIRST_OWN_OP
from harness import Graph, ir, lits

REFUSED = {ir.MetalKernelNode}

# In test_program.py, where a row would not say enough.
IN_PROGRAMS = {
    ir.ARangeNode, ir.FullNode, ir.FullLikeNode, ir.TriNode, ir.TrilNode, ir.TriuNode,
    ir.AddIntNode, ir.SubtractIntNode, ir.MultiplyIntNode, ir.FloorDivideIntNode, ir.ModIntNode,
    ir.ItemIntNode, ir.SymSizeNode, ir.RandomBitsNode, ir.IfNode, ir.ScanNode,
    ir.UpdateAndAttendNode,  # test_update_and_attend.py
}  # fmt: skip


def test_every_node_is_run():
    tested = set(IN_PROGRAMS)
    for module in (test_node_elementwise, test_node_reduce, test_node_shape, test_node_index, test_node_nn):
        tested |= {row.node for row in module.ROWS} | getattr(module, "COVERED", set())
    assert {op for op in ir.OPS.values() if op.OP_TYPE < FIRST_OWN_OP} - tested == REFUSED


def test_metal_kernels_are_refused(capfd):
    g = Graph()
    g.emit(
        ir.MetalKernelNode(
            name="k", source="", inputs=[], outputs=[g.output((1,))], grid=lits(1), threadgroup=lits(1)
        )
    )
    with pytest.raises(RuntimeError, match="0x:?10"):
        g.load()
    assert "instruction 0 (MetalKernelNode)" in capfd.readouterr().err
