"""The table of what differs on ExecuTorch's own MLX delegate: a program for each kind of difference, and no more."""

import dataclasses

import pytest
import torch
from executorch_mlx.inspect.portability import file_findings
from executorch_mlx.inspect.pte import Contents, Delegate
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.portability import KINDS, program_findings, shared_buffers
from irprograms.graph import FLOAT32, SCALAR_TYPES, Graph, lit, lits, number

INT64, FLOAT64, UINT16 = (SCALAR_TYPES[dtype] for dtype in (torch.int64, torch.float64, torch.uint16))


def unary(op, dtype=torch.float32, shape=(2, 3), **fields):
    """Return a function that builds a program with one instruction `op`."""

    def build(g):
        g.emit(op(x=g.input(shape, dtype), out=g.output(shape, dtype), **fields))

    return build


def binary(op, dtype=torch.int32, constant=False, **fields):
    def build(g):
        b = g.constant(torch.ones(3, dtype=dtype)) if constant else g.input([3], dtype)
        g.emit(op(a=g.input([3], dtype), b=b, out=g.output([3], dtype), **fields))

    return build


def create(op, **fields):
    return lambda g: g.emit(op(out=g.output([2]), **fields))


def literal(g):
    g.output_value(vid := g.new_value())
    g.emit(ir.AddIntNode(a=lit(1 << 40), b=lit(1), out=vid))


def constant_update(g):
    g.emit(
        ir.SliceUpdateNode(
            dst=g.constant(torch.ones(4)),
            update=g.input([2]),
            out=g.output([4]),
            axis=lit(0),
            start=lit(0),
            stop=lit(2),
        )
    )


def item(dtype):
    def build(g):
        g.output_value(g.item(g.input([1], dtype)))

    return build


def index_copy(of_view, dtype=torch.int64):
    def build(g):
        index = g.input([4], dtype)
        if of_view:
            g.emit(ir.SliceNode(x=index, out=(view := g.new_temp()), axis=lit(0), start=lit(0), stop=lit(4), step=2))
            index = view
        g.emit(ir.IndexCopyNode(dst=g.input([4]), update=g.input([2]), indices=index, out=g.output([4]), axis=0))

    return build


def scatter(updates):
    def build(g):
        g.emit(
            ir.ScatterAddNode(
                x=g.input([4, 3]),
                indices=g.input([2, 3], torch.int64),
                updates=g.input(updates),
                out=g.output([4, 3]),
                axis=0,
            )
        )

    return build


def conv(op, axes, **fields):
    """A convolution of 4 channels with windows of 3 elements."""

    def build(g):
        x, w = g.input([1, *[8] * axes, 4]), g.constant(torch.ones(4, *[3] * axes, 4 // fields.get("groups", 1)))
        g.emit(op(x=x, w=w, out=g.output([1, *[8] * axes, 4]), **fields))

    return build


def metal(g):
    g.emit(
        ir.MetalKernelNode(
            name="k",
            source="",
            inputs=[g.input([1])],
            outputs=[g.output([1])],
            grid=lits(1, 1, 1),
            threadgroup=lits(1, 1, 1),
        )
    )


def addmm(alpha):
    return lambda g: g.emit(ir.AddmmNode(mat1=g.input([2, 2]), mat2=g.input([2, 2]), out=g.output([2, 2]), alpha=alpha))


def float_value(g):
    g.inputs.append((g.new_value(), ir.SlotType.FloatValueSlot))


def bool_output(g):
    g.output_value(vid := g.new_value(), ir.SlotType.BoolValueSlot)
    g.emit(ir.AddIntNode(a=lit(1), b=lit(0), out=vid))


def initial_value(g):
    g.emit(ir.IdCopyNode(x=g.buffer([2], initial=torch.ones(2)), out=g.output([2])))


def large_buffer(g):
    g.emit(ir.IdCopyNode(x=g.buffer([1 << 30, 2]), out=g.output([1 << 30, 2])))


# Kind → programs that have a finding of this kind, and programs that are as similar as possible and have none.
PROGRAMS = {
    "extension": ([unary(ir.ErfInvNode)], [unary(ir.ErfNode)]),
    "metal_source": ([metal], []),
    "dtype": (
        [
            unary(ir.AbsNode, torch.uint16),
            unary(ir.AsTypeNode, scalar_type=UINT16),
            create(ir.FullNode, shape=lits(2), v=number(1), scalar_type=FLOAT64),
        ],
        [unary(ir.AbsNode, torch.uint8)],
    ),
    "item_bytes": ([item(torch.bool), item(torch.int16), item(torch.float32)], [item(torch.int32), item(torch.int64)]),
    "integer_quotient": ([binary(ir.FloorDivideNode)], [binary(ir.FloorDivideNode, torch.float32)]),
    "zero_divisor": (
        [binary(ir.RemainderNode)],
        [binary(ir.RemainderNode, constant=True), binary(ir.RemainderNode, torch.float32)],
    ),
    "integer_power": ([binary(ir.PowerNode)], [binary(ir.PowerNode, constant=True), binary(ir.PowerNode, torch.uint8)]),
    "literal": ([literal, create(ir.ARangeNode, start=lit(0), stop=lit(1 << 32), step=lit(1 << 31))], []),
    "fill_value": (
        [create(ir.FullNode, shape=lits(2), v=number(2**24 + 1), scalar_type=INT64)],
        [
            create(ir.FullNode, shape=lits(2), v=number(2**24 + 2), scalar_type=INT64),
            create(ir.FullNode, shape=lits(2), v=number(2**40), scalar_type=INT64),
            create(ir.FullNode, shape=lits(2), v=number(0.1), scalar_type=FLOAT32),
        ],
    ),
    "empty": (
        [
            create(ir.FullNode, shape=lits(2, 0), v=number(1), scalar_type=FLOAT32),
            unary(ir.AbsNode, shape=(2, 0)),
            create(ir.ARangeNode, start=lit(3), stop=lit(3), step=lit(1)),
        ],
        [create(ir.FullNode, shape=[], v=number(1), scalar_type=FLOAT32)],
    ),
    "scalar_operand": ([unary(ir.SoftmaxNode, shape=(), axis=0)], [unary(ir.SoftmaxNode, axis=0)]),
    "all_axes": ([unary(ir.LogSumExpNode, axes=[])], [unary(ir.LogSumExpNode, axes=[0]), unary(ir.SumNode, axes=[])]),
    "half_precision": (
        [
            unary(ir.MeanNode, torch.float16, axes=[0]),
            unary(ir.StdNode, torch.bfloat16, axes=[0]),
            unary(ir.SiluNode, torch.float16),
        ],
        [unary(ir.MeanNode, axes=[0]), unary(ir.MaxNode, torch.float16, axes=[0]), unary(ir.SiluNode, torch.bfloat16)],
    ),
    "scale_without_bias": ([addmm(2.0)], [addmm(1.0)]),
    "constant_update": ([constant_update], []),
    "copied_indices": ([index_copy(True), index_copy(False, torch.int32)], [index_copy(False)]),
    "scatter_shape": ([scatter([3, 3]), scatter([2, 4])], [scatter([2, 3])]),
    "long_step": (
        [unary(ir.SliceNode, axis=lit(0), start=lit(0), stop=lit(2), step=2**31 - 1)],
        [unary(ir.SliceNode, axis=lit(0), start=lit(0), stop=lit(1 << 62), step=2)],
    ),
    "flat_roll": ([unary(ir.RollNode, shift=lits(1), axes=[])], [unary(ir.RollNode, shift=lits(1), axes=[0])]),
    "conv_groups": ([conv(ir.Conv3DNode, 3, groups=2)], [conv(ir.Conv3DNode, 3), conv(ir.Conv2DNode, 2, groups=2)]),
    "conv_padding": (
        [conv(ir.ConvTranspose1DNode, 1, padding=3), conv(ir.ConvTranspose2DNode, 2, padding_w=3)],
        [conv(ir.ConvTranspose1DNode, 1, padding=2)],
    ),
    "value_input": ([float_value], []),
    "value_output": ([bool_output], [item(torch.int32)]),
    "large_buffer": ([large_buffer], []),
    "initial_value": ([initial_value], []),
}


def kinds_in(build) -> set[str]:
    g = Graph()
    build(g)
    return {finding.problem.kind for finding in program_findings(g.graph(), g.data)}


@pytest.mark.parametrize("kind, build", [(kind, b) for kind, (found, _) in PROGRAMS.items() for b in found])
def test_difference_is_found(kind, build):
    assert kinds_in(build) == {kind}


@pytest.mark.parametrize("kind, build", [(kind, b) for kind, (_, none) in PROGRAMS.items() for b in none])
def test_similar_program_is_portable(kind, build):
    assert kinds_in(build) == set()


def counter():
    g = Graph()
    buffer, one = g.buffer([2], initial=torch.ones(2)), g.constant(torch.ones(2))
    g.emit(ir.AddNode(a=buffer, b=one, out=buffer), ir.IdCopyNode(x=buffer, out=g.output([2])))
    return g, buffer, one


def test_init_chain_sets_the_initial_value():
    g, buffer, one = counter()
    assert {f.problem.kind for f in program_findings(g.graph(), g.data)} == {"initial_value"}
    g.init_chain = g.chain(ir.IdCopyNode(x=one, out=buffer))
    assert program_findings(g.graph(), g.data) == []


def test_methods_that_share_a_buffer():
    first, second = (counter()[0].graph() for _ in range(2))
    (finding,) = shared_buffers({"prefill": [first], "decode": [second]})
    assert finding.problem.kind == "shared_state"
    assert str(finding).startswith("b1: shared by methods prefill, decode here")
    assert shared_buffers({"forward": [first, second]}) == []


def in_order(held, expected):
    """Return the findings of a program with one input and one output, whose tensors have the orders `expected`."""
    g = Graph()
    g.emit(ir.AbsNode(x=g.input([2, 3]), out=g.output([2, 3])))
    graph = g.graph()
    graph.tensor_meta[1] = dataclasses.replace(graph.tensor_meta[1], dim_order=held)
    contents = Contents(0, ["forward"], [Delegate("forward", 0, b"", graph, expected)], {}, {}, {})
    return [finding.problem.kind for finding in file_findings(contents).get("forward", [])]


def test_orders_of_inputs_and_outputs():
    assert in_order([0, 1], ((0, 1), (0, 1))) == []
    assert in_order([1, 0], ((0, 1), (1, 0))) == []
    assert in_order([0, 1], ((0, 1), (1, 0))) == ["output_order"]
    assert in_order([0, 1], ((1, 0), (0, 1))) == ["input_order"]


def test_every_kind_is_tested():
    assert KINDS.keys() == PROGRAMS.keys() | {"shared_state", "input_order", "output_order"}


def test_finding_names_instruction_reason_and_remedy():
    g = Graph()
    g.emit(ir.FloorDivideNode(a=g.input([3], torch.int32), b=g.input([3], torch.int32), out=g.output([3], torch.int32)))
    (finding,) = program_findings(g.graph())
    assert str(finding) == (
        "%2 = FloorDivide (chain 0, instruction 0): returns a float that is not rounded down; "
        "export the model again with this version"
    )
