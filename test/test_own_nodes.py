"""Nodes that ExecuTorch's own MLX delegate lacks, and the two ways of lowering."""

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from executorch.runtime import Runtime
from executorch_mlx import MLXPartitioner
from executorch_mlx.serialization.read import read_payload

ERFINV = torch.ops.aten.erfinv.default


class Inverse(torch.nn.Module):
    def forward(self, x):
        return torch.erfinv(x * 0.5) + 1


class Small(torch.nn.Module):
    """Has what is kept whole (`layer_norm`), a buffer that is written, and a branch."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.add_(x.sum(0))
        y = self.linear(self.norm(x))
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (y,)) + self.seen


def lower(way, module, inputs, partitioner):
    """Both ways of ExecuTorch's, with erfinv allowed though it is not in core ATen."""
    config = EdgeCompileConfig(_core_aten_ops_exception_list=[ERFINV])
    exported = torch.export.export(module.eval(), inputs)
    if way == "to_backend":
        return to_edge(exported, compile_config=config).to_backend(partitioner)
    return to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)


def calls(manager):
    nodes = [n for n in manager.exported_program().graph.nodes if n.op == "call_function"]
    return [str(n.target) for n in nodes if "getitem" not in str(n.target)]


def payloads(program):
    return [read_payload(bytes(d.data)) for d in program.executorch_program.backend_delegate_data]


WAYS = pytest.mark.parametrize("way", ["to_backend", "to_edge_transform_and_lower"])


@WAYS
def test_both_ways_of_lowering(way, delegate):
    module, x = Small(), torch.randn(3, 4)
    with torch.no_grad():
        manager = lower(way, module, (x,), MLXPartitioner())
        assert calls(manager) == ["executorch_call_delegate"]
        program = Runtime.get().load_program(manager.to_executorch().buffer)
        method = program.load_method("forward")
        for inputs in (x.abs(), -x.abs()):
            torch.testing.assert_close(method.execute([inputs])[0], module(inputs))


@WAYS
def test_own_nodes_are_used_if_they_are_asked_for(way, delegate):
    x = torch.rand(5)
    manager = lower(way, Inverse(), (x,), MLXPartitioner(own_nodes=True))
    assert calls(manager) == ["executorch_call_delegate"]
    program = manager.to_executorch()
    (graph,) = payloads(program)
    ops = {i.op.NAME for chain in graph.instruction_chains for i in chain.instructions}
    assert "ErfInvNode" in ops
    loaded = Runtime.get().load_program(program.buffer)
    torch.testing.assert_close(loaded.load_method("forward").execute([x])[0], Inverse()(x))


@WAYS
def test_own_nodes_are_not_used_otherwise(way):
    partitioner = MLXPartitioner()
    lower(way, Inverse(), (torch.rand(5),), partitioner)
    (refused,) = partitioner.explain().refused
    assert refused.target == "aten.erfinv.default"
    assert refused.reason.endswith("MLXPartitioner(own_nodes=True) asks for it")
