"""Test cases of the nodes that reduce or sort, and of cumsum."""

import torch
from executorch_mlx.serialization import ir

from ..node_case import NodeCase, random

X = random(2, 3, 4)
MASK = torch.tensor([[True, False, True], [True, True, True]])
UINT = torch.uint32


def reduce(node, op, x=X, **kwargs):
    """Yield cases of a reduction over one axis, over two axes that are kept, and over all axes."""
    for axes, keepdims in (([1], False), ([-1, 0], True), (None, False)):
        dims = list(range(x.ndim)) if axes is None else axes
        yield NodeCase(
            node,
            {"x": x},
            lambda x, dims=dims, keepdims=keepdims: op(x, dims, keepdims),
            {"axes": axes, "keepdims": keepdims},
            note=f"{axes}",
            **kwargs,
        )


def one_by_one(op):
    """Return a reduction over several axes that applies `op` to one axis at a time."""

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
    *reduce(ir.MedianNode, median),
    *reduce(ir.AnyNode, one_by_one(lambda x, d, k: x.any(d, keepdim=k)), x=MASK, dtypes=(torch.bool,)),
    *reduce(ir.AllNode, one_by_one(lambda x, d, k: x.all(d, keepdim=k)), x=MASK, dtypes=(torch.bool,)),
    *(
        NodeCase(
            node,
            {"x": X},
            lambda x, op=op, ddof=ddof: op(x, dim=[1], correction=ddof),
            {"axes": [1], "ddof": ddof},
            note=str(ddof),
        )
        for node, op in ((ir.VarNode, torch.var), (ir.StdNode, torch.std))
        for ddof in (0, 1)
    ),
    NodeCase(ir.SumNode, {"x": torch.tensor(3.0)}, lambda x: x, note="0-d"),
    NodeCase(ir.SumNode, {"x": torch.empty(0, 3)}, lambda x: x.sum(0), {"axes": [0]}, note="empty"),
    NodeCase(ir.MedianNode, {"x": torch.tensor(3.0)}, lambda x: x, note="0-d"),
]

ARG_REDUCTIONS = [
    *(
        NodeCase(
            node,
            {"x": X},
            lambda x, op=op, d=d, k=k: op(x, d, keepdim=k).to(UINT),
            {"axis": d, "keepdims": k},
            note=f"{d}",
        )
        for node, op in ((ir.ArgmaxNode, torch.argmax), (ir.ArgminNode, torch.argmin))
        for d, k in ((1, False), (-1, True))
    )
]

SORTED = [
    NodeCase(ir.SortNode, {"x": X}, lambda x: x.sort(1).values, {"axis": 1}),
    NodeCase(ir.SortNode, {"x": torch.empty(2, 0)}, lambda x: x, {"axis": 1}, note="empty"),
    NodeCase(ir.ArgsortNode, {"x": X}, lambda x: x.argsort(-1).to(UINT), {"axis": -1}),
    NodeCase(ir.CumsumNode, {"x": X}, lambda x: x.cumsum(1), {"axis": 1}),
    NodeCase(
        ir.CumsumNode,
        {"x": X},
        lambda x: x.flip(1).cumsum(1).flip(1) - x,
        {"axis": 1, "reverse": True, "inclusive": False},
        note="reverse-exclusive",
    ),
]

CASES = REDUCE + ARG_REDUCTIONS + SORTED
