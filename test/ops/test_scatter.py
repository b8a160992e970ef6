"""index_put, scatter, masked_scatter and embedding_bag."""

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from loaded_method import LoadedMethod
from oprows import FLOATS, Dyn, bools, data, f32, floats, i32, i64, indices, pytest_function, row
from torch.nn import functional as F

F32_ONLY = (f32,)
N = Dyn("n", 3, also=(1, 5))
aten = torch.ops.aten


def put(x, *rest):
    return x.clone().index_put_(*rest)


def first_rows(x, n):
    """Call operators whose handlers compare extents, with an extent that is known only at run time."""
    n = n.item()
    torch._check(n >= 0)
    torch._check(n <= 8)
    part, index = x[:n], torch.arange(n)[:, None].expand(n, 2)  # no index twice: torch leaves open which value is kept
    return x.scatter(0, index, part), torch.cat([part, x]), part.squeeze(0) + 1, x.scatter_reduce(0, index, part, "sum")


PUT = [
    row(
        "index_put/several indices",
        aten.index_put,
        cases=[
            (floats(5, 4), [data([3, 0]), data([-1, 2])], floats(2)),
            (floats(5, 4, 3), [data([3, 0]), data([1, 2])], floats(3)),
            (floats(5, 4, 3), [None, data([[3, 0]]), data([[1], [2]])], floats(2, 2)),
            (floats(5, 4, 3), [data([3, 0]), None, data([1, 2])], floats(2, 4)),
            (floats(5, 4), [data([[3, 0], [1, 2]])], floats(2, 2, 4)),
            (floats(5, 4), [data(2)], floats(4)),
            (floats(5), [data(-1)], floats()),
            (floats(5), [data(2)], floats(), True),
        ],
        dtypes=FLOATS,
    ),
    row(
        "index_put/accumulated",
        aten.index_put,
        cases=[
            (floats(5, 4), [data([3, 0, 3])], floats(4), True),
            (floats(5), [data([-1, 4, 4])], floats(3), True),
            (floats(5, 4), [data([3, 3]), data([1, 1])], floats(), True),
            (floats(2, 5, 2), [None, data([3, 3])], floats(2, 2, 2), True),
        ],
        dtypes=(f32, i32),
    ),
    row(
        "index_put/mask",
        lambda x, m: (put(x, [m], torch.tensor(2.5)), put(x, [m[:, 0]], torch.tensor(1.0), True)),
        floats(3, 4),
        bools(3, 4),
        dtypes=F32_ONLY,
    ),
    row(
        "index_put/assignment",
        lambda x, i, y: put(x, [i[:, None], torch.arange(3)], y),
        floats(5, 3),
        data([4, 1]),
        floats(2, 3),
        dtypes=F32_ONLY,
    ),
    row(
        "index_put/mask of several",
        lambda x, m, y: put(x, [m], y),
        floats(3),
        data([True, False, True]),
        floats(2),
        dtypes=F32_ONLY,
        host="several values under a mask",
    ),
]

SCATTER = [
    row(
        "scatter.src",
        cases=[
            (floats(3, 5), 0, data([[0, 1, 2, 0, 0], [1, 2, 0, 1, 2]]), floats(2, 5)),
            (floats(3, 5), -1, data([[4, 0], [2, 1]]), floats(3, 3)),
            (floats(4), 0, data([2]), floats(1)),
            (floats(2, 3, 2), 1, data([[[2, 1]], [[0, 2]]]), floats(2, 1, 2)),
            (floats(4), 0, indices(0, below=2), floats(0)),
        ],
        dtypes=FLOATS + (i32,),
    ),
    row(
        "scatter.value",
        cases=[(floats(3, 5), 1, data([[0, 4], [1, 3]]), 7.5), (floats(4), 0, data([1, 1]), -1)],
        dtypes=FLOATS,
    ),
    row("scatter.value/one hot", lambda i: torch.zeros(3, 5).scatter(1, i[:, None], 1.0), indices(3, below=5)),
    row("scatter.src/number of rows in a tensor", first_rows, floats(8, 2), data(3), dtypes=F32_ONLY, calls=2),
    row(
        "masked_scatter",
        cases=[
            (floats(3, 4), bools(3, 4), floats(12)),
            (floats(3, 4), bools(4), floats(3, 5)),
            (floats(4), bools(3, 4), floats(12)),
            (floats(3), data([False, True, True]), floats(2)),
            (floats(3), data([False] * 3), floats(0)),
            (floats(), data(True), floats(1)),
        ],
        dtypes=(f32, i64),
    ),
    row("masked_scatter/dynamic", torch.masked_scatter, floats(N, 2), data([False, True]), floats(20), dtypes=F32_ONLY),
    row(
        "index.Tensor/separate axes",
        lambda x, i, j: (x[i, :, j], x[:, i, :, j], x[i[:, None], :, j]),
        floats(4, 4, 5, 4),
        indices(3, below=4, low=-4),
        indices(3, below=4, low=-4),
        dtypes=F32_ONLY,
    ),
]


class Bag(torch.nn.Module):
    def __init__(self, mode, include_last_offset=False, padding_idx=None):
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(
            7, 4, mode=mode, include_last_offset=include_last_offset, padding_idx=padding_idx
        )

    def forward(self, *arguments):
        return self.bag(*arguments)


BAGS = [
    row("_embedding_bag/sum", Bag("sum"), indices(6, below=7), data([0, 2, 2, 5]), dtypes=FLOATS),
    row("_embedding_bag/mean", Bag("mean", padding_idx=2), indices(6, below=7), data([0, 2, 2, 5]), dtypes=F32_ONLY),
    row("_embedding_bag/max", Bag("max", True), indices(6, below=7), data([0, 2, 2, 6]), dtypes=F32_ONLY),
    row(
        "_embedding_bag/last offset before the end",
        Bag("mean", True),
        indices(6, below=7),
        data([0, 2, 4]),
        dtypes=F32_ONLY,
    ),
    row("_embedding_bag/rows", Bag("mean"), indices(3, 2, below=7), dtypes=F32_ONLY),
    row(
        "_embedding_bag_forward_only/factors",
        lambda w, i, o, f: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=f),
        floats(7, 4),
        indices(5, below=7),
        data([0, 3]),
        floats(5),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "_embedding_bag_forward_only",
        lambda w, i, o: aten._embedding_bag_forward_only(w, i, o, False, 1)[0],
        floats(7, 4),
        indices(5, below=7),
        data([0, 3]),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
]

ROWS = [*PUT, *SCATTER, *BAGS]

test_op_row = pytest_function(ROWS)


class Indexed(torch.nn.Module):
    """Reads and writes a table at indices of its rows and columns, multiplied by `factor`."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, table, rows, columns):
        if self.factor != 1:
            rows, columns = rows * self.factor, columns * self.factor
        return (
            table.scatter(1, columns[:, None], -1.0),
            table.scatter_reduce(1, columns[:, None], -table, "amin"),
            table[rows, columns],
            table.index_put([rows, columns], torch.tensor(-1.0)),
        )


def test_an_index_out_of_range_never_reaches_another_row(delegate, capfd):
    inputs = torch.arange(12.0).reshape(3, 4), torch.tensor([0, 1]), torch.tensor([1, 4])
    clamped = torch.tensor([0, 2]), torch.tensor([2, 3])
    for factor in (1, 2):
        exported = torch.export.export(Indexed(factor), inputs)
        manager = to_edge_transform_and_lower(
            exported, partitioner=[MLXPartitioner()], compile_config=EdgeCompileConfig(_check_ir_validity=False)
        )
        method = LoadedMethod(manager.to_executorch().buffer)
        if factor == 1:  # the indices are on the host
            with pytest.raises(RuntimeError):
                method.execute(list(inputs))
            assert "index 4 is out of range [-4, 4)" in capfd.readouterr().err
        else:
            torch.testing.assert_close(tuple(method.execute(list(inputs))), Indexed(1)(inputs[0], *clamped))
