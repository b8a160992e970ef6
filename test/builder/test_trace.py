"""Tracing a function: dynamic dimensions are not specialized, and a graph is traced once for two walks."""

from operator import attrgetter

import executorch_mlx.ops  # noqa: F401  (fills the registry)
import pytest
import torch
from executorch_mlx.builder.program import ProgramBuilder
from executorch_mlx.builder.registry import REGISTRY, Registry, Unsupported
from executorch_mlx.serialization import ir


class Tangent(torch.nn.Module):
    def forward(self, x):
        return torch.tan(x)


class Padding(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.pad(x, (0, 3), value=1.0)


def dynamic_program(module=None):
    rows = torch.export.Dim("rows", min=2, max=64)
    return torch.export.export(module or Tangent(), (torch.randn(3, 4),), dynamic_shapes=({0: rows},))


def branches_on_its_size(x):
    return torch.exp(x) if x.shape[0] == 3 else torch.sin(x)


def test_function_that_specializes_a_dimension_is_refused():
    registry = Registry()
    registry.add(torch.ops.aten.tan.default, lambda P, self: P.trace(branches_on_its_size, self)[0])
    program = dynamic_program()
    shape_env = program.graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    reasons = ProgramBuilder(program, registry).check()
    (reason,) = reasons.values()
    assert "would specialize the dynamic dimension" in reason
    assert not shape_env.replacements
    with pytest.raises(Unsupported, match="would specialize the dynamic dimension"):
        ProgramBuilder(program, registry).build()


calls = []


def counted_tan(x):
    calls.append(tuple(x.shape))
    return torch.sin(x) / torch.cos(x)


class Tangents(torch.nn.Module):
    def forward(self, x):
        return torch.tan(torch.tan(x)) + torch.tan(x[:1])


def test_a_function_is_traced_once_for_equal_arguments():
    """The second walk uses the traces of the first, and each call of the function has nodes of its own."""
    registry = Registry()
    for name in ("slice.Tensor", "add.Tensor", "sin.default", "cos.default", "div.Tensor"):
        target = attrgetter(name)(torch.ops.aten)
        registry.add(target, REGISTRY.handler_for(target))
    registry.add(torch.ops.aten.tan.default, lambda P, self: P.trace(counted_tan, self)[0])
    program = torch.export.export(Tangents(), (torch.randn(3, 4),)).run_decompositions({})
    calls.clear()
    assert set(ProgramBuilder(program, registry).check().values()) == {None}
    assert calls == [(3, 4), (1, 4)]
    builder = ProgramBuilder(program, registry).build()
    assert len(calls) == 2
    ops = [emitted.op for emitted in builder.chains[0]]
    assert ops.count(ir.SinNode) == ops.count(ir.CosNode) == ops.count(ir.DivideNode) == 3


def test_padding_of_a_tensor_with_a_dynamic_dimension_is_traced():
    registry = Registry()
    for name in ("cat.default", "full.default", "sin.default", "sym_size.int"):
        target = attrgetter(name)(torch.ops.aten)
        registry.add(target, REGISTRY.handler_for(target))
    registry.add(
        torch.ops.aten.pad.default,
        lambda P, self, pad, mode, value: P.trace(lambda x: Padding()(torch.sin(x)), self)[0],
    )
    builder = ProgramBuilder(dynamic_program(Padding()), registry).build()
    ops = [emitted.op for emitted in builder.chains[0]]
    assert ops[0] == ir.SinNode and ops[-1] == ir.ConcatenateNode
