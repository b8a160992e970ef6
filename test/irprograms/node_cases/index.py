"""Test cases of the nodes that slice, gather and scatter."""

import torch
from executorch_mlx.serialization import ir

from ..graph import lit
from ..node_case import NodeCase, random, random_indices

X = random(4, 5, 6)
I32 = torch.int32


def take_index(literal=None, tid=None):
    """The operand `index` of a TakeNode: an integer literal, or the tensor slot `tid`."""
    if tid is not None:
        return ir.IntOrVidOrTid(kind=2, tid=tid)
    return ir.IntOrVidOrTid(literal=literal)


def slice_case(expected, note="", step=1, **bounds):
    fields = {name: lit(x) for name, x in bounds.items()} | {"step": step}
    return NodeCase(ir.SliceNode, {"x": X}, expected, fields, note=note)


def slice_update(dst, update):
    dst = dst.clone()
    dst[:, 1:4] = update
    return dst


CASES = [
    slice_case(lambda x: x[:, 1:4], axis=1, start=1, stop=4),
    slice_case(lambda x: x[..., -4::2], "step", axis=-1, start=-4, stop=2**62, step=2),
    slice_case(lambda x: x[3:1], "empty", axis=0, start=3, stop=1),
    slice_case(lambda x: x.flip(1), "reversed", axis=1, start=-1, stop=-(2**31), step=-1),
    slice_case(lambda x: x[:, 1:5].flip(1)[:, ::2], "step -2", axis=1, start=4, stop=0, step=-2),
    slice_case(lambda x: x[:, :0], "step -1, empty", axis=1, start=1, stop=3, step=-1),
    slice_case(lambda x: x[:, 3:4], "lowest step", axis=1, start=3, stop=0, step=-(2**31)),
    slice_case(lambda x: x[:, 1:2], "highest step", axis=1, start=1, stop=5, step=2**31 - 1),
    NodeCase(
        ir.SliceUpdateNode,
        {"dst": X, "update": random(4, 3, 6)},
        slice_update,
        {"axis": lit(1), "start": lit(1), "stop": lit(4)},
    ),
    NodeCase(
        ir.SliceUpdateNode,
        {"dst": X, "update": random(4, 1, 6)},
        lambda dst, update: torch.cat([dst[:, :1], update, dst[:, 2:]], 1),
        {"axis": lit(1), "start": lit(1), "stop": lit(5), "step": 2**31 - 1},
        note="highest step",
    ),
    NodeCase(ir.TakeNode, {"x": X}, lambda x: x[:, -2], {"axis": 1, "index": take_index(-2)}),
    NodeCase(
        ir.TakeAlongAxisNode,
        {"x": X, "indices": random_indices(4, 2, 6, high=5)},
        lambda x, indices: x.gather(1, indices),
        {"axis": 1},
    ),
    NodeCase(
        ir.IndexCopyNode,
        {"dst": X, "update": random(4, 3, 6), "indices": torch.tensor([1, 2, 4])},
        lambda dst, update, indices: dst.index_copy(1, indices, update),
        {"axis": 1},
    ),
    NodeCase(
        ir.IndexCopyNode,
        {"dst": random(2, 3000), "update": random(2, 1500), "indices": torch.arange(0, 3000, 2)},
        lambda dst, update, indices: dst.index_copy(1, indices, update),
        {"axis": 1},
        note="no consecutive indices",
    ),
    NodeCase(
        ir.ScatterAddNode,
        {"x": X, "indices": random_indices(4, 7, 6, high=5), "updates": random(4, 7, 6)},
        lambda x, indices, updates: x.scatter_add(1, indices, updates),
        {"axis": 1},
    ),
    NodeCase(
        ir.ScatterAddNode,
        {"x": X, "indices": random_indices(2, 3, 1, high=5), "updates": random(3, 4, 6)},
        lambda x, indices, updates: x.scatter_add(1, indices, updates),
        {"axis": 1},
        note="corner",
    ),
    NodeCase(
        ir.GatherNode,
        {"x": X, "indices": [torch.tensor([3, 0], dtype=I32), torch.tensor([1, -1], dtype=I32)]},
        lambda x, indices: x[indices[0].long(), indices[1].long()].reshape(2, 1, 1, 6),
        {"axes": [0, 1], "slice_sizes": [1, 1, 6]},
    ),
]
