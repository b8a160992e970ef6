"""Weights of a file are used where the system has mapped them."""

import sys
from pathlib import Path

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from executorch_mlx import MLXPartitioner, load_delegate

MEGABYTE = 1 << 20
ROWS, COLUMNS = 16 * 1024, 1024  # 64 MB


class Counter(torch.nn.Module):
    """A large table, and a larger state: a small one is kept for as long as the first call may fail."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, COLUMNS)
        self.register_buffer("seen", torch.zeros(1, 1, 2 * ROWS, COLUMNS))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        row = self.table(index)
        seen = torch.ops.mlx.cache_update(self.seen, row[None, None], index)
        self.seen.copy_(seen)
        return row + seen[0, 0, :1]


def taken() -> int:
    """Bytes of memory behind which there is no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_copy(tmp_path):
    load_delegate()
    module, path = Counter().eval(), tmp_path / "table.pte"
    index = torch.tensor([7])
    exported = torch.export.export(module, (index,))
    edge = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)
    del edge, exported

    before = taken()
    program = Runtime.get().load_program(path)
    method = program.load_method("forward")
    loaded = taken()
    rows = [method.execute([torch.tensor([i])])[0] for i in (7, 0, ROWS - 1, 7)]
    grown = taken() - before
    assert loaded - before < 16 * MEGABYTE
    assert grown < 32 * MEGABYTE, "a call copied the table or the state"
    table = module.table.weight
    assert rows[0].equal(table[None, 7])
    assert rows[1].equal(2 * table[None, 0])
    assert rows[2].equal(table[None, ROWS - 1] + table[None, 0])
    assert rows[3].equal(table[None, 7] + table[None, 0])
