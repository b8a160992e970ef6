"""Tracing a function does not specialize the dynamic dimensions of the program."""

import pytest
import torch
from executorch_mlx.builder.program import ProgramBuilder
from executorch_mlx.builder.registry import Registry, Unsupported


class Tangent(torch.nn.Module):
    def forward(self, x):
        return torch.tan(x)


def dynamic_program():
    rows = torch.export.Dim("rows", min=2, max=64)
    return torch.export.export(Tangent(), (torch.randn(3, 4),), dynamic_shapes=({0: rows},))


def branches_on_its_size(x):
    return torch.exp(x) if x.shape[0] == 3 else torch.sin(x)


def test_function_that_specializes_a_dimension_is_refused():
    registry = Registry()
    registry.add(
        torch.ops.aten.tan.default, lambda P, self: P.trace(branches_on_its_size, self)[0]
    )
    program = dynamic_program()
    shape_env = program.graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    reasons = ProgramBuilder(program, registry).check()
    (reason,) = reasons.values()
    assert "would specialize the dynamic dimension" in reason
    assert not shape_env.replacements
    with pytest.raises(Unsupported, match="would specialize the dynamic dimension"):
        ProgramBuilder(program, registry).build()
