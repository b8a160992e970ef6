"""The facts in which ExecuTorch's own MLX delegate differs from this runtime, each as a program that shows it.

For this runtime, the interpreter must agree with the runtime itself.
"""

import pytest
import torch
from executorch_mlx.serialization import ir
from irprograms import Graph, lit, lits, number, pte, value_of
from loaded_method import LoadedMethod

from interpreter import OFFICIAL, OURS, Program, Refused, Undefined
from interpreter.nodes import NODES

I64, I32, U16, BOOL = torch.int64, torch.int32, torch.uint16, torch.bool
INT64_TYPE, INT32_TYPE, FLOAT_TYPE = 4, 3, 6


def item_of_bool(g: Graph):
    x, out = g.input((1,), BOOL), g.output((2,), I64)
    g.emit(ir.FullNode(out=out, shape=lits(2), v=ir.FloatOrVid(vid=g.item(x), is_vid=True), scalar_type=INT64_TYPE))
    return [torch.tensor([True])], Undefined, [1, 1]


def item_of_float(g: Graph):
    x, out = g.input((1,)), g.output((1,), I64)
    g.emit(ir.FullNode(out=out, shape=lits(1), v=ir.FloatOrVid(vid=g.item(x), is_vid=True), scalar_type=INT64_TYPE))
    return [torch.tensor([3.0])], [0x40400000], [3]


def literal_beyond_int32(g: Graph):
    x, out = g.input((4,)), g.output((2,))
    g.emit(ir.SliceNode(x=x, out=out, axis=lit(0), start=lit(2), stop=lit(2**40)))
    return [torch.arange(4.0)], [2, 3], [2, 3]


def sum_beyond_int32(g: Graph):
    x, out, v = g.input((4,)), g.output((2,)), g.new_value()
    g.emit(ir.AddIntNode(a=lit(2**31 - 1), b=lit(1), out=v))
    g.emit(ir.SliceNode(x=x, out=out, axis=lit(0), start=lit(2), stop=value_of(v)))
    return [torch.arange(4.0)], Refused, [2, 3]


def quotient_of_integers(g: Graph):
    a, b, t, out = g.input((4,), I64), g.input((4,), I64), g.new_temp(), g.output((4,))
    g.emit(ir.FloorDivideNode(a=a, b=b, out=t), ir.AsTypeNode(x=t, out=out, scalar_type=FLOAT_TYPE))
    return [torch.tensor([7, -7, 7, 8]), torch.tensor([2, 2, -2, 2])], [3.5, -4.5, -4.5, 4], [3, -4, -4, 4]


def full_without_elements(g: Graph):
    x, t, out = g.input((2,)), g.new_temp(), g.output((2,))
    g.emit(ir.FullNode(out=t, shape=lits(0), v=number(1.0), scalar_type=FLOAT_TYPE))
    g.emit(ir.ConcatenateNode(tensors=[x, t], out=out, axis=0))
    return [torch.ones(2)], Refused, [1, 1]


def number_beyond_float32(g: Graph):
    out = g.output((1,), I64)
    g.input((1,))
    g.emit(ir.FullNode(out=out, shape=lits(1), v=number(2.0**24 + 1), scalar_type=INT64_TYPE))
    return [torch.ones(1)], [2**24], [2**24 + 1]


def initial_value(g: Graph):
    x, b, out = g.input((2,)), g.buffer((2,), initial=torch.tensor([5.0, 6.0])), g.output((2,))
    g.emit(ir.AddNode(a=b, b=x, out=b), ir.IdCopyNode(x=b, out=out))
    return [torch.ones(2)], [1, 1], [6, 7]


def update_of_a_constant(g: Graph):
    x, c, out = g.input((1,)), g.constant(torch.zeros(3)), g.output((3,))
    g.emit(ir.SliceUpdateNode(dst=c, update=x, out=out, axis=lit(0), start=lit(1), stop=lit(2)))
    return [torch.ones(1)], Refused, [0, 1, 0]


def unsigned_16_bits(g: Graph):
    x, out = g.input((2,), U16), g.output((2,), I32)
    g.emit(ir.AsTypeNode(x=x, out=out, scalar_type=INT32_TYPE))
    return [torch.tensor([1, 65535], dtype=U16)], Refused, [1, 65535]


def channels_last_input(g: Graph):
    x, out = g.input((1, 2, 1, 2), dim_order=[0, 2, 3, 1]), g.output((1, 2, 1, 2))
    g.emit(ir.IdCopyNode(x=x, out=out))
    data = torch.arange(4.0).reshape(1, 2, 1, 2).to(memory_format=torch.channels_last)
    return [data], Refused, [0, 1, 2, 3]


def channels_last_output(g: Graph):
    x, out = g.input((1, 2, 1, 2)), g.output((1, 2, 1, 2))
    g.outputs[-1] = (*g.outputs[-1][:3], [0, 2, 3, 1])
    g.emit(ir.IdCopyNode(x=x, out=out))
    return [torch.arange(4.0).reshape(1, 2, 1, 2)], [0, 2, 1, 3], [0, 1, 2, 3]


def seed_beyond_int32(g: Graph):
    """With the seed 2^32 + 5, the first 24 bits of two words, beside those of the seed 5."""
    seed, t, out = g.input((1,), I64), g.new_temp(), g.output((2,), I64)
    g.emit(ir.RandomBitsNode(out=t, shape=lits(2), seed=g.item(seed)))
    g.emit(ir.AsTypeNode(x=t, out=out, scalar_type=INT64_TYPE))
    near, far = (torch.ops.mlx.random_bits([2], torch.tensor(s)).long().tolist() for s in (5, 2**32 + 5))
    return [torch.tensor([2**32 + 5])], near, far


def argmax_of_a_scalar(g: Graph):
    x, t, out = g.input(()), g.new_temp(), g.output((), I64)
    g.emit(ir.ArgmaxNode(x=x, out=t, axis=-1), ir.AsTypeNode(x=t, out=out, scalar_type=INT64_TYPE))
    return [torch.tensor(3.0)], Refused, [0]


def mean_in_half_precision(g: Graph):
    x, out = g.input((4,), torch.float16), g.output((1,), torch.float16)
    g.emit(ir.MeanNode(x=x, out=out, axes=[0], keepdims=True))
    return [torch.full((4,), 30000.0, dtype=torch.float16)], [float("inf")], [30000]


def sums_at_fewer_indices(g: Graph):
    x, i, u, out = g.input((3,)), g.input((1,), I64), g.input((2,)), g.output((3,))
    g.emit(ir.ScatterAddNode(x=x, indices=i, updates=u, out=out, axis=0))
    # One index is broadcast there, so that both updates are added.
    return [torch.zeros(3), torch.tensor([1]), torch.tensor([1.0, 2.0])], [0, 3, 0], [0, 1, 0]


def indices_with_gaps(g: Graph):
    x, i, t, out = g.input((2, 2)), g.input((2, 2), I64), g.new_temp(), g.output((2, 2))
    g.emit(ir.TakeNode(x=i, out=t, index=ir.IntOrVidOrTid(literal=0), axis=1))
    g.emit(ir.IndexCopyNode(dst=x, update=x, indices=t, out=out, axis=0))
    return [torch.arange(4.0).reshape(2, 2), torch.tensor([[1, 7], [0, 7]])], Undefined, [2, 3, 0, 1]


def product_without_bias(g: Graph):
    a, b, out = g.input((1, 1)), g.input((1, 1)), g.output((1, 1))
    g.emit(ir.AddmmNode(mat1=a, mat2=b, out=out, alpha=2.0))
    return [torch.full((1, 1), 3.0), torch.full((1, 1), 5.0)], [15], [30]


CASES = [
    item_of_bool,
    item_of_float,
    literal_beyond_int32,
    sum_beyond_int32,
    quotient_of_integers,
    full_without_elements,
    number_beyond_float32,
    initial_value,
    update_of_a_constant,
    unsigned_16_bits,
    channels_last_input,
    channels_last_output,
    seed_beyond_int32,
    argmax_of_a_scalar,
    mean_in_half_precision,
    sums_at_fewer_indices,
    indices_with_gaps,
    product_without_bias,
]


def flat(outputs) -> list:
    return outputs[0].contiguous().reshape(-1).tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_difference(delegate, case):
    g = Graph()
    inputs, official, ours = case(g)
    file = g.pte()
    if isinstance(official, list):
        assert flat(Program(file, OFFICIAL).execute("forward", inputs)) == official
    else:
        with pytest.raises(official) as refused:
            Program(file, OFFICIAL).execute("forward", inputs)
        assert refused.type is official
    assert flat(Program(file, OURS).execute("forward", inputs)) == ours
    assert flat(LoadedMethod(file).execute(inputs)) == ours


def test_every_node_has_a_line():
    assert set(NODES) == {op for op in ir.OPS.values() if op.OP_TYPE < ir.FIRST_EXTENSION}


def test_a_node_of_ours_alone_is_unknown():
    g = Graph()
    x, out = g.input((1,)), g.output((1,))
    g.emit(ir.ErfInvNode(x=x, out=out))
    with pytest.raises(Refused, match="unknown nodes: ErfInvNode"):
        Program(g.pte(), OFFICIAL).execute("forward", [torch.zeros(1)])


def test_methods_share_no_buffer():
    """Two methods count in buffers of one name. The count of a method outlives its calls."""
    methods = {}
    for name in ("a", "b"):
        g = methods[name] = Graph()
        step, count, out = g.input((1,)), g.buffer((1,)), g.output((1,))
        g.emit(ir.AddNode(a=count, b=step, out=count), ir.IdCopyNode(x=count, out=out))
    calls = ["a", "a", "b", "a"]
    counts = {
        meaning.name: [flat(program.execute(name, [torch.ones(1)]))[0] for name in calls]
        for meaning in (OFFICIAL, OURS)
        for program in [Program(pte(methods), meaning)]
    }
    assert counts == {OFFICIAL.name: [1, 2, 1, 3], OURS.name: [1, 2, 3, 4]}


def test_the_init_chain_runs():
    g = Graph()
    x, c, b, out = g.input((1,)), g.constant(torch.tensor([4.0])), g.buffer((1,)), g.output((1,))
    g.init_chain = g.chain(ir.AddNode(a=c, b=c, out=b))
    g.emit(ir.AddNode(a=b, b=x, out=out))
    for meaning in (OFFICIAL, OURS):
        assert flat(Program(g.pte(), meaning).execute("forward", [torch.ones(1)])) == [9]


def test_replacements_are_ignored():
    g = Graph()
    x, out = g.input((1,)), g.output((1,))
    g.emit(ir.ExpNode(x=x, out=out))
    g.replacements = [(0, 0, 1, ir.ErfInvNode(x=x, out=out))]
    for meaning in (OFFICIAL, OURS):
        assert flat(Program(g.pte(), meaning).execute("forward", [torch.zeros(1)])) == [1]
