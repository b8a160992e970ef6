"""Small files to inspect, exported once per session."""

from pathlib import Path

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from inspected_models import Branches, Net


def export(path: Path, methods: dict, **kwargs) -> Path:
    edge = to_edge_transform_and_lower(methods, **kwargs)
    path.write_bytes(edge.to_executorch().buffer)
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pte")


@pytest.fixture(scope="session")
def net(folder) -> Path:
    """A file with two methods. The batch of `forward` is dynamic, from 0 to 16."""
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", max=16)
    methods = {
        "forward": torch.export.export(Net(), (torch.randn(3, 8),), dynamic_shapes=({0: batch},)),
        "branches": torch.export.export(Branches(), (torch.randn(2, 2),)),
    }
    partitioner = {name: [MLXPartitioner()] for name in methods}
    return export(folder / "net.pte", methods, partitioner=partitioner)


@pytest.fixture(scope="session")
def portable(folder) -> Path:
    """A file without an MLX delegate."""
    return export(folder / "portable.pte", {"forward": torch.export.export(Branches(), (torch.randn(2, 2),))})
