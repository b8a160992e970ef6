import pytest
import torch
from harness import Graph, ir, lit
from rows import FLOATS, Row, cases, check, random

X = random(2, 3, 4)
F32 = FLOATS[:1]
MASK = torch.tensor([[True, False, True], [True, True, True]])
UINT = torch.uint32


def reduce(node, op, x=X, **kwargs):
    """Over one axis, over two with kept axes, and over all."""
    for axes, keepdims in (([1], False), ([-1, 0], True), (None, False)):
        dims = list(range(x.ndim)) if axes is None else axes
        yield Row(
            node,
            {"x": x},
            lambda x, dims=dims, keepdims=keepdims: op(x, dims, keepdims),
            {"axes": axes, "keepdims": keepdims},
            note=f"{axes}",
            **kwargs,
        )


def one_by_one(op):
    def apply(x, dims, keepdims):
        for d in sorted((d % x.ndim for d in dims), reverse=True):
            x = op(x, d, keepdims)
        return x

    return apply


def median(x, dims, keepdims):
    kept = [d for d in range(x.ndim) if d not in [d % x.ndim for d in dims]]
    flat = x.permute(*kept, *[d % x.ndim for d in dims]).reshape(*[x.shape[d] for d in kept], -1)
    y = flat.float().quantile(0.5, dim=-1).to(x.dtype)
    for d in sorted(d % x.ndim for d in dims) if keepdims else ():
        y = y.unsqueeze(d)
    return y


REDUCE = [
    *reduce(ir.SumNode, torch.sum),
    *reduce(ir.MeanNode, torch.mean),
    *reduce(ir.ProdNode, one_by_one(lambda x, d, k: x.prod(d, keepdim=k))),
    *reduce(ir.MaxNode, torch.amax),
    *reduce(ir.MinNode, torch.amin),
    *reduce(ir.LogSumExpNode, torch.logsumexp),
    *reduce(ir.MedianNode, median, dtypes=F32),
    *reduce(ir.AnyNode, one_by_one(lambda x, d, k: x.any(d, keepdim=k)), x=MASK, dtypes=(torch.bool,)),
    *reduce(ir.AllNode, one_by_one(lambda x, d, k: x.all(d, keepdim=k)), x=MASK, dtypes=(torch.bool,)),
    *(
        Row(
            node,
            {"x": X},
            lambda x, op=op, ddof=ddof: op(x, dim=[1], correction=ddof),
            {"axes": [1], "ddof": ddof},
            note=str(ddof),
            dtypes=F32,
        )
        for node, op in ((ir.VarNode, torch.var), (ir.StdNode, torch.std))
        for ddof in (0, 1)
    ),
    Row(ir.SumNode, {"x": torch.tensor(3.0)}, lambda x: x, note="0-d"),
    Row(ir.SumNode, {"x": torch.empty(0, 3)}, lambda x: x.sum(0), {"axes": [0]}, note="empty"),
    Row(ir.MedianNode, {"x": torch.tensor(3.0)}, lambda x: x, note="0-d", dtypes=F32),
]

ARGS = [
    *(
        Row(
            node,
            {"x": X},
            lambda x, op=op, d=d, k=k: op(x, d, keepdim=k).to(UINT),
            {"axis": d, "keepdims": k},
            note=f"{d}",
        )
        for node, op in ((ir.ArgmaxNode, torch.argmax), (ir.ArgminNode, torch.argmin))
        for d, k in ((1, False), (-1, True))
    ),
]

SORTED = [
    Row(ir.SortNode, {"x": X}, lambda x: x.sort(1).values, {"axis": 1}),
    Row(ir.SortNode, {"x": torch.empty(2, 0)}, lambda x: x, {"axis": 1}, note="empty"),
    Row(ir.ArgsortNode, {"x": X}, lambda x: x.argsort(-1).to(UINT), {"axis": -1}, dtypes=F32),
    Row(ir.CumsumNode, {"x": X}, lambda x: x.cumsum(1), {"axis": 1}, dtypes=F32),
    Row(
        ir.CumsumNode,
        {"x": X},
        lambda x: x.flip(1).cumsum(1).flip(1) - x,
        {"axis": 1, "reverse": True, "inclusive": False},
        dtypes=F32,
        note="reverse-exclusive",
    ),
]

ROWS = REDUCE + ARGS + SORTED
COVERED = {ir.PartitionNode, ir.ArgPartitionNode}


@pytest.mark.parametrize("row, dtype", cases(ROWS))
def test_row(row, dtype):
    check(row, dtype)


def test_partition_splits_at_kth():
    x = random(3, 50)
    g = Graph()
    a = g.input((3, 50))
    values, places = g.output((3, 50)), g.output((3, 50), UINT)
    g.emit(
        ir.PartitionNode(x=a, out=values, kth=lit(10), axis=-1),
        ir.ArgPartitionNode(x=a, out=places, kth=lit(-40), axis=1),
    )
    part, arg = g.run(x)
    want = x.sort(-1).values
    for result in (part, x.gather(-1, arg.to(torch.int64))):
        assert torch.equal(result[:, 10], want[:, 10])
        assert torch.equal(result[:, :10].sort(-1).values, want[:, :10])
        assert torch.equal(result[:, 11:].sort(-1).values, want[:, 11:])


@pytest.mark.parametrize(
    "node, fields, said",
    [
        (ir.SumNode, {"axes": [3]}, "axis 3 is outside [-3, 3)"),
        (ir.SumNode, {"axes": [1, -2]}, "axis -2 comes twice"),
        (ir.ArgmaxNode, {"axis": -4}, "axis -4 is outside [-3, 3)"),
        (ir.PartitionNode, {"axis": 0, "kth": lit(2)}, "kth 2 is outside [-2, 2)"),
    ],
)
def test_wrong_axes_are_errors(node, fields, said, capfd):
    g = Graph()
    g.emit(node(x=g.input((2, 3, 4)), out=g.output((2, 3, 4)), **fields))
    with pytest.raises(RuntimeError):
        g.run(X)
    assert f"chain 0, instruction 0 ({node.NAME}): {said}" in capfd.readouterr().err
