"""Every IR node has a rule for the types of its results. For a node without a rule, the inspector shows `?`.

A table here is a FlatBuffer table of the schema. Nodes with the same fields share a table and the rule of the table.
"""

from executorch_mlx.serialization import ir
from executorch_mlx.serialization.infer_types import infer_types
from executorch_mlx.serialization.type_rules import OP_RULES, TABLE_RULES, rule_of
from executorch_mlx.serialization.types import Env, Type
from irprograms import BOOL, FLOAT32
from oprows.inferred_types import problems

# Exceptions: the results of a loop depend on its chains, and the results of a Metal kernel on its source.
WITHOUT_RULE = {ir.ScanNode, ir.WhileNode, ir.MetalKernelNode}


def writes_tensors(op: type[ir.Op]) -> bool:
    return any(f.output and f.type.strip("[]") == "Tid" for f in op.FIELDS)


def test_every_node_has_a_rule():
    missing = {op for op in ir.OPS.values() if writes_tensors(op) and rule_of(op) is None}
    missing -= WITHOUT_RULE
    add = ", ".join(f"{op.NAME} or its table {op.TABLE.__name__}" for op in missing)
    assert not missing, f"backends/mlx/serialization/type_rules.py: add a rule for {add}"


def test_every_rule_is_used():
    used = {op.TABLE for op in ir.OPS.values() if op not in OP_RULES}
    assert TABLE_RULES.keys() <= used
    assert all(TABLE_RULES.get(op.TABLE) is not rule for op, rule in OP_RULES.items())


def test_new_node_of_a_shared_table_needs_no_rule():
    class NewBinaryNode(ir.BinaryNode, ir.Op):
        OP_TYPE = 255

    class NewReduceNode(ir.ReduceNode, ir.Op):
        OP_TYPE = 254

    assert rule_of(NewBinaryNode) is TABLE_RULES[ir.BinaryNode]
    binary = NewBinaryNode(a=ir.Tid(0), b=ir.Tid(1), out=ir.Tid(3))
    reduce = NewReduceNode(x=ir.Tid(3), out=ir.Tid(4), axes=[0])
    results = [t for typed in infer_types(program(binary, reduce)) for t in typed.results.values()]
    assert results == [Type((2, 3), "float32"), Type((3,), "float32")]


def test_node_without_a_rule_has_an_unknown_type():
    class NewShapeNode(ir.ShapeNode, ir.Op):
        OP_TYPE = 253

    assert rule_of(NewShapeNode) is None
    node = NewShapeNode(x=ir.Tid(0), out=ir.Tid(3), shape=[ir.IntOrVid(literal=6)])
    (new, exp) = infer_types(program(node, ir.ExpNode(x=ir.Tid(3), out=ir.Tid(2))))
    assert new.results == {3: Type()} and str(Type()) == "?[?]"
    assert exp.results == {2: Type((2, 3), "float32")}  # the declared type of the output


def test_gathered_axis():
    gather = ir.AllGatherNode(x=ir.Tid(0), out=ir.Tid(1), axis=0, rank=0, size=2)
    for extent, gathered in ((4, 8), (None, None)):  # None: known only at run time
        env = Env({0: Type((extent, 3), "float32")}, {})
        assert rule_of(ir.AllGatherNode)(gather, env) == Type((gathered, 3), "float32")


def test_range_of_too_many_numbers_has_an_unknown_type():
    start, stop, step = (ir.IntOrVid(literal=v) for v in (-(2**63), 2**63 - 1, 1))
    (typed,) = infer_types(program(ir.ARangeNode(out=ir.Tid(3), start=start, stop=stop, step=step, scalar_type=3)))
    assert typed.results == {3: Type()}


def program(*ops: ir.Op) -> ir.MLXGraph:
    """Return a program with two inputs and an output of type float32[2, 3], and with temporaries from slot 3 on."""
    meta = ir.TensorMeta(shape=[ir.ShapeDim(value=2), ir.ShapeDim(value=3)], scalar_type=FLOAT32)
    return ir.MLXGraph(
        num_input_tensors=2,
        num_output_tensors=1,
        num_temp_tensors=2,
        instruction_chains=[ir.InstructionChain(instructions=[ir.Instruction(op=op) for op in ops])],
        tensor_meta=[meta] * 3,
    )


def test_problems_name_the_missing_rule(monkeypatch):
    less = program(ir.LessNode(a=ir.Tid(0), b=ir.Tid(1), out=ir.Tid(2)))
    less.tensor_meta[2] = ir.TensorMeta(shape=less.tensor_meta[2].shape, scalar_type=BOOL)
    shape = [ir.IntOrVid(literal=2), ir.IntOrVid(literal=3)]
    reshape = program(ir.ReshapeNode(x=ir.Tid(0), out=ir.Tid(2), shape=shape))
    assert problems(less) == problems(reshape) == []
    monkeypatch.delitem(OP_RULES, ir.LessNode)
    monkeypatch.delitem(OP_RULES, ir.ReshapeNode)
    assert problems(less) == [
        "LessNode: the inspector infers float32[2, 3], expected bool[2, 3]:"
        " add a rule for LessNode to backends/mlx/serialization/type_rules.py"
    ]
    assert problems(reshape) == [
        "ReshapeNode has no type rule: add one for ShapeNode or ReshapeNode to backends/mlx/serialization/type_rules.py"
    ]
