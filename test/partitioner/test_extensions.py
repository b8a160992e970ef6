"""`allow_extensions`, and ExecuTorch's two ways to lower a program."""

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.serialization.read import read_payload
from loaded_method import LoadedMethod

ERFINV = torch.ops.aten.erfinv.default


class ErfInv(torch.nn.Module):
    def forward(self, x):
        return torch.erfinv(x * 0.5) + 1


class Small(torch.nn.Module):
    """Has `layer_norm`, which the partitioner keeps whole, a mutable buffer, and a `cond`."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total.add_(x.sum(0))
        y = self.linear(self.norm(x))
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (y,)) + self.total


def lower(way, module, inputs, partitioner):
    """Lower with `to_backend` or `to_edge_transform_and_lower`. Accepts erfinv, which is not a core ATen operator."""
    config = EdgeCompileConfig(_core_aten_ops_exception_list=[ERFINV])
    exported = torch.export.export(module.eval(), inputs)
    if way == "to_backend":
        return to_edge(exported, compile_config=config).to_backend(partitioner)
    return to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)


def called_operators(manager):
    nodes = [n for n in manager.exported_program().graph.nodes if n.op == "call_function"]
    return [str(n.target) for n in nodes if "getitem" not in str(n.target)]


def payloads(program):
    return [read_payload(bytes(d.data)) for d in program.executorch_program.backend_delegate_data]


both_ways = pytest.mark.parametrize("way", ["to_backend", "to_edge_transform_and_lower"])


@both_ways
def test_program_is_one_delegate_and_matches_eager(way, delegate):
    module, x = Small(), torch.randn(3, 4)
    with torch.no_grad():
        manager = lower(way, module, (x,), MLXPartitioner())
        assert called_operators(manager) == ["executorch_call_delegate"]
        method = LoadedMethod(manager.to_executorch().buffer)
        for inputs in (x.abs(), -x.abs()):
            torch.testing.assert_close(method.execute([inputs])[0], module(inputs))


@both_ways
def test_extensions_are_used_if_allowed(way, delegate):
    x = torch.rand(5)
    manager = lower(way, ErfInv(), (x,), MLXPartitioner(allow_extensions=True))
    assert called_operators(manager) == ["executorch_call_delegate"]
    program = manager.to_executorch()
    (graph,) = payloads(program)
    ops = {i.op.NAME for chain in graph.instruction_chains for i in chain.instructions}
    assert "ErfInvNode" in ops
    torch.testing.assert_close(LoadedMethod(program.buffer).execute([x])[0], ErfInv()(x))


@both_ways
def test_extensions_are_declined_by_default(way):
    """The program cannot run: ExecuTorch has no kernel for erfinv."""
    partitioner = MLXPartitioner()
    manager = lower(way, ErfInv(), (torch.rand(5),), partitioner)
    assert any("erfinv" in call for call in called_operators(manager))
    (declined,) = partitioner.explain().refused
    assert declined.target == "aten.erfinv.default"
    assert declined.reason.endswith("MLXPartitioner(allow_extensions=True) permits it")
