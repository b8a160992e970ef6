"""`lower` traces a graph once, and gives the program that ExecuTorch's own sequence of passes gives."""

import dataclasses

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.lowered_backend_module import get_lowered_submodules
from executorch_mlx import MLXPartitioner
from executorch_mlx.custom_ops.primitives import argpartition
from executorch_mlx.llm.export.decoder import Tracing
from executorch_mlx.llm.export.lowering import lower
from executorch_mlx.llm.export.serialize import serialize
from executorch_mlx.serialization.read import read_payload
from torch.fx.experimental.proxy_tensor import make_fx


class Layer(torch.nn.Module):
    """An RMSNorm with casts as in language models, a product, a buffer that calls update, and an unused weight."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.unused = torch.nn.Parameter(torch.ones(1000))
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        self.count.add_(1)
        return torch.nn.functional.silu(self.linear(self.weight * normed.to(x.dtype))) + self.count


class Undelegated(torch.nn.Module):
    def forward(self, x):
        return torch.cumsum(x.abs(), 0) + torch.special.zeta(x * 2, x).exp()


class UndelegatedPartition(torch.nn.Module):
    def forward(self, x):
        return argpartition(x.double(), 1, -1)


def exported(module):
    return torch.export.export(module.eval(), (torch.ones(1, 8),))


def graphs(manager):
    """The delegated programs, without the names of their tensors."""
    modules = get_lowered_submodules(manager.exported_program().graph_module)
    return [dataclasses.replace(read_payload(module.processed_bytes), named_slots=None) for _, module, _ in modules]


def test_the_program_is_that_of_executorch():
    lowered, report = lower({"forward": exported(Layer())}, {"answer": 42}, allow_extensions=False)
    assert not report.refused
    expected = to_edge_transform_and_lower(
        exported(Layer()), partitioner=[MLXPartitioner()], compile_config=EdgeCompileConfig(_check_ir_validity=False)
    )
    assert graphs(lowered) == graphs(expected)
    assert lowered.config_methods == {"answer"}
    assert lowered.to_executorch().buffer


class Halves(torch.nn.Module):
    """Returns a transposed result, one of a dynamic size, and an input."""

    def forward(self, x, y):
        return (x @ x.mT)[1:].mT, torch.cat([y, x[0]]), y


class Partly(torch.nn.Module):
    """Has two delegates, with an operator of ExecuTorch between them."""

    def forward(self, x, y):
        return (torch.special.zeta(x * 2, x) + y[0]).exp(), y


@pytest.mark.parametrize("module", [Halves, Partly])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_recorded_results_give_the_file_of_executorch(module, is_dynamic):
    def lowered(has_recorded_results=True):
        shapes = ({0: torch.export.Dim("rows", min=3, max=64)} if is_dynamic else None, None)
        program = torch.export.export(module(), (torch.ones(4, 8), torch.ones(8)), dynamic_shapes=shapes)
        manager, _ = lower({"forward": program}, {}, allow_extensions=False)
        if not has_recorded_results:
            for _, delegate, _ in get_lowered_submodules(manager.exported_program().graph_module):
                del delegate.original_module.module  # that of the class remains
        return manager

    assert serialize(lowered()).buffer == serialize(lowered(has_recorded_results=False)).buffer


def test_serialize_does_not_run_the_graph_of_a_delegate():
    lowered, _ = lower({"forward": exported(Layer())}, {}, allow_extensions=False)
    ((_, delegate, _),) = get_lowered_submodules(lowered.exported_program().graph_module)
    graph = delegate.original_module.graph
    node = graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default)[0]
    node.target = torch.ops.aten.bmm.default  # this call would fail
    assert serialize(lowered).buffer
    with pytest.raises(Exception, match="bmm"):
        delegate.original_module.module()(torch.ones(1, 8))


def test_an_undelegated_node_goes_to_executorch():
    lowered, report = lower({"forward": exported(Undelegated())}, {}, allow_extensions=False)
    assert [d.target for d in report.refused] == ["aten.special_zeta.default"]
    assert len(graphs(lowered)) == 2


@pytest.mark.parametrize("mode, recorded", [(torch.no_grad, 0), (torch.enable_grad, 2)])
def test_a_grad_mode_that_stays_is_not_recorded(mode, recorded):
    def function(x):
        with Tracing(), mode():
            return x + 1

    with torch.no_grad():
        graph = make_fx(function, pre_dispatch=True)(torch.ones(3)).graph
    assert [node.target for node in graph.nodes].count(torch._C._set_grad_enabled) == recorded


def test_an_operator_that_only_mlx_can_run_has_a_reason():
    reason = r"argpartition_default: mlx\.argpartition\.default cannot be delegated to MLX: .*float64"
    with pytest.raises(RuntimeError, match=reason):
        lower({"forward": exported(UndelegatedPartition())}, {}, allow_extensions=True)
