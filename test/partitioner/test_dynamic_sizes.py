"""Dimensions that are dynamic at `torch.export` stay dynamic, or a warning names the operator that made them static."""

import pytest
import torch
import torch.nn.functional as F
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime
from executorch_mlx.workarounds import dynamic_sizes
from function_module import Function

CELLS = torch.nn.ModuleDict({"lstm": torch.nn.LSTMCell(4, 5), "gru": torch.nn.GRUCell(4, 5)}).eval()

# The axis of the dynamic dimension, the other sizes, and the function.
CASES = {
    "lstm_cell": (0, (4,), lambda x: CELLS["lstm"](x)),
    "gru_cell": (0, (4,), lambda x: CELLS["gru"](x)),
    "unsafe_split": (0, (4,), lambda x: torch.unsafe_split(x, 2, 1)),
    "unsafe_chunk": (0, (4,), lambda x: torch.unsafe_chunk(x, 2, 1)),
    "unbind_copy": (0, (4,), lambda x: torch.unbind_copy(x, 1)),
    "empty": (0, (4,), lambda x: torch.empty(x.shape[0], 3).fill_(2) + x[:, :3]),
    "new_empty": (0, (4,), lambda x: x.new_empty(x.shape[0], 3).fill_(2) + x[:, :3]),
    "circular_batch": (0, (2, 4), lambda x: F.pad(x, (1, 1), mode="circular")),
    "circular_length": (2, (1, 2), lambda x: F.pad(x, (1, 2), mode="circular")),
}


def export(function, axis, sizes):
    shape = [*sizes[:axis], 3, *sizes[axis:]]
    dynamic = ({axis: torch.export.Dim("size", min=2, max=8)},)
    return torch.export.export(Function(function), (torch.randn(shape),), dynamic_shapes=(dynamic,))


@pytest.mark.parametrize("axis, sizes, function", CASES.values(), ids=CASES)
def test_dimension_stays_dynamic(axis, sizes, function, recwarn):
    partitioner = MLXPartitioner()
    manager = to_edge_transform_and_lower(export(function, axis, sizes), partitioner=[partitioner])
    assert not partitioner.explain().static_dimensions and not partitioner.explain().refused
    method = Runtime.get().load_program(bytes(manager.to_executorch().buffer)).load_method("forward")
    for size in (8, 2):
        x = torch.randn(*sizes[:axis], size, *sizes[axis:])
        expected = function(x)
        expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
        torch.testing.assert_close(list(method.execute([x])), expected)


def test_warning_names_the_operator(monkeypatch):
    monkeypatch.setattr(dynamic_sizes, "decompositions", lambda nodes: {})
    partitioner = MLXPartitioner()
    with pytest.warns(
        UserWarning, match=r"input inputs_0, dimension 0: aten\.\S*split\S* made it static, with the size 3"
    ):
        to_edge_transform_and_lower(export(CASES["unsafe_split"][2], 0, (4,)), partitioner=[partitioner])
    assert "dimension 0" in str(partitioner.explain())


@pytest.mark.parametrize("case, operator", [("lstm_cell", "split"), ("new_empty", "empty")])
def test_warning_after_to_edge_names_the_operator(case, operator):
    axis, sizes, function = CASES[case]
    edge = to_edge(export(function, axis, sizes))
    message = rf"dimension {axis}: \S*{operator}\S* made it static, with the size 3 .*to_edge_transform_and_lower"
    with pytest.warns(UserWarning, match=message):
        edge.to_backend(MLXPartitioner())
