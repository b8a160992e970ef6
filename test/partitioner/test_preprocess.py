"""What a lowered program contains: constants, the initial values of buffers, and instructions."""

import pytest
import torch
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime
from executorch_mlx.builder import program as program_module
from executorch_mlx.builder.assemble import assemble
from executorch_mlx.builder.program import ProgramBuilder
from executorch_mlx.builder.slots import Space
from executorch_mlx.preprocess import CONSTANT_ALIGNMENT, MLXBackend
from executorch_mlx.serialization.read import read_payload
from loaded_method import LoadedMethod


def lowered_modules(edge):
    return [m for m in edge.exported_program().graph_module.modules() if hasattr(m, "backend_id")]


def lower(module, *inputs, **kwargs):
    program = torch.export.export(module, inputs, **kwargs)
    return to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()])


def load(edge):
    return LoadedMethod(edge.to_executorch().buffer)


class TwoEqualWeights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.randn(8, 8)
        self.a = torch.nn.Parameter(weight)
        self.b = torch.nn.Parameter(weight.clone())
        self.c = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.a + x @ self.b + x @ self.c


def test_equal_constants_are_stored_once():
    (module,) = lowered_modules(lower(TwoEqualWeights(), torch.randn(2, 8)))
    assert len(module.named_data_store_output.pte_data) == 2
    graph = read_payload(module.processed_bytes)
    assert graph.num_constant_tensors == 2


def test_constants_are_aligned():
    (module,) = lowered_modules(lower(TwoEqualWeights(), torch.randn(2, 8)))
    entries = module.named_data_store_output.pte_data.values()
    assert {entry.alignment for entry in entries} == {CONSTANT_ALIGNMENT}


def test_names_of_constant_slots_are_the_keys_of_their_data():
    (module,) = lowered_modules(lower(TwoEqualWeights(), torch.randn(2, 8)))
    graph = read_payload(module.processed_bytes)
    names = {s.name for s in graph.named_slots if s.slot.idx < graph.num_constant_tensors}
    assert names == set(module.named_data_store_output.pte_data)


def test_check_reads_no_constant(monkeypatch):
    edge = to_edge(torch.export.export(TwoEqualWeights(), (torch.randn(2, 8),)))
    monkeypatch.setattr(program_module, "stored_tensor", lambda _, name: pytest.fail(f"{name} was read"))
    reasons = ProgramBuilder(edge.exported_program()).check()
    assert reasons and set(reasons.values()) == {None}


class Accumulator(torch.nn.Module):
    """One buffer starts from zero and one does not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.total.add_(x)
        self.calls.add_(1)
        return self.total * 2


def test_buffers_start_from_their_initial_value_and_persist():
    edge = lower(Accumulator(), torch.ones(3))
    (module,) = lowered_modules(edge)
    graph = read_payload(module.processed_bytes)
    assert graph.num_mutable_buffer_tensors == 2
    # The buffer that starts from zero needs no data.
    keys = module.named_data_store_output.pte_data
    assert sum(key.startswith("total.") for key in keys) == 1
    assert sum(key.startswith("calls.") for key in keys) == 0
    method, eager = load(edge), Accumulator()
    for step in range(4):
        x = torch.full((3,), float(step))
        torch.testing.assert_close(method.execute([x])[0], eager(x))


def test_unused_values_are_not_computed():
    class Unused(torch.nn.Module):
        def forward(self, x):
            torch.exp(x)  # dropped by export or by the builder
            return torch.sin(x)

    (module,) = lowered_modules(lower(Unused(), torch.randn(3)))
    (chain,) = read_payload(module.processed_bytes).instruction_chains
    assert [i.op.NAME for i in chain.instructions] == ["SinNode"]


def test_common_subexpression_is_computed_once():
    class Twice(torch.nn.Module):
        def forward(self, x):
            return torch.exp(x + 1) * torch.exp(x + 1)

    (module,) = lowered_modules(lower(Twice(), torch.randn(3)))
    (chain,) = read_payload(module.processed_bytes).instruction_chains
    assert [i.op.NAME for i in chain.instructions] == ["AddNode", "ExpNode", "MultiplyNode"]


def test_backend_id():
    assert MLXBackend.__name__ == "MLXBackend"
    (module,) = lowered_modules(lower(TwoEqualWeights(), torch.randn(2, 8)))
    assert module.backend_id == "MLXBackend"


def test_to_backend_matches_eager():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    x = torch.randn(2, 4)
    edge = to_edge(torch.export.export(module, (x,))).to_backend(MLXPartitioner())
    torch.testing.assert_close(load(edge).execute([x])[0], module(x))


def test_constant_of_wrong_shape_raises():
    edge = to_edge(torch.export.export(TwoEqualWeights(), (torch.randn(2, 8),)))
    builder = ProgramBuilder(edge.exported_program()).build()
    slots = [s for e in builder.chains[0] for s in e.fields.values()]
    slot = next(s for s in slots if getattr(s, "space", None) == Space.CONSTANT)
    slot.data = lambda: torch.zeros(3)
    with pytest.raises(ValueError, match=r"constant .*: got torch.float32 \[3\]"):
        assemble(builder)


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return x @ self.weight


def test_methods_share_their_constants():
    module = Linear()
    programs = {
        name: torch.export.export(module, (torch.randn(length, 64),))
        for name, length in (("prefill", 5), ("decode", 1))
    }
    edge = to_edge_transform_and_lower(programs, partitioner={name: [MLXPartitioner()] for name in programs})
    buffer = edge.to_executorch().buffer
    assert len(buffer) < 2 * 64 * 64 * 4
    program = Runtime.get().load_program(buffer)
    for name, length in (("prefill", 5), ("decode", 1)):
        x = torch.randn(length, 64)
        torch.testing.assert_close(program.load_method(name).execute([x])[0], module(x))
