"""Tracing a composite leaves the dynamic extents of the program alone."""

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


def settles_its_rows(x):
    return torch.exp(x) if x.shape[0] == 3 else torch.sin(x)


def test_a_text_that_fixes_an_extent_is_refused():
    registry = Registry()
    registry.add(
        torch.ops.aten.tan.default, lambda P, self: P.trace(settles_its_rows, self)[0]
    )
    program = dynamic_program()
    shape_env = program.graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    reasons = ProgramBuilder(program, registry).check()
    (reason,) = reasons.values()
    assert "would fix the dynamic extent" in reason
    assert not shape_env.replacements
    with pytest.raises(Unsupported, match="would fix the dynamic extent"):
        ProgramBuilder(program, registry).build()
