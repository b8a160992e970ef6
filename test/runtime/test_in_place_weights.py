"""Weights are used in place, in the memory-mapped file."""

import sys
from pathlib import Path

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from loaded_method import LoadedMethod

MEGABYTE = 1 << 20
VOCABULARY, WIDTH = 16 * 1024, 1024  # the sizes of a float32 table of 64 MiB


class SumOfEmbeddings(torch.nn.Module):
    """A large table and a larger buffer. The first call keeps no backup of a buffer that exceeds 64 MiB."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("history", torch.zeros(1, 1, 2 * VOCABULARY, WIDTH))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        embedding = self.table(index)
        history = torch.ops.mlx.cache_update(self.history, embedding[None, None], index)
        self.history.copy_(history)
        return embedding + history[0, 0, :1]


def anonymous_memory() -> int:
    """Bytes of resident memory that are not mapped from a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no /proc, from which the test reads its memory")
def test_loading_and_calls_do_not_copy_weights(tmp_path):
    module, path = SumOfEmbeddings().eval(), tmp_path / "table.pte"
    index = torch.tensor([7])
    exported = torch.export.export(module, (index,))
    edge = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)
    del edge, exported

    before = anonymous_memory()
    method = LoadedMethod(path)
    loaded = anonymous_memory()
    results = [method.execute([torch.tensor([i])])[0] for i in (7, 0, VOCABULARY - 1, 7)]
    grown = anonymous_memory() - before
    assert loaded - before < 16 * MEGABYTE
    assert grown < 32 * MEGABYTE, "a call copied the table or the buffer"
    table = module.table.weight
    assert results[0].equal(table[None, 7])
    assert results[1].equal(2 * table[None, 0])
    assert results[2].equal(table[None, VOCABULARY - 1] + table[None, 0])
    assert results[3].equal(table[None, 7] + table[None, 0])
