"""What is not lowered runs on ExecuTorch's own kernels, and `explain()` says why."""

import pytest
import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch.runtime import Runtime
from executorch_mlx import MLXPartitioner


class Program:
    """A module lowered as far as it goes."""

    def __init__(self, module, inputs, dynamic_shapes=None):
        self.eager = module
        exported = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
        self.partitioner = MLXPartitioner()
        manager = to_edge_transform_and_lower(exported, partitioner=[self.partitioner])
        self.delegates = sum(
            n.target is torch.ops.higher_order.executorch_call_delegate
            for n in manager.exported_program().graph.nodes
        )
        buffers = [name for name, _ in module.named_buffers()]
        # Without this pass ExecuTorch starts the buffers that stay with it at zero.
        passes = [InitializedMutableBufferPass(buffers)] if buffers else []
        self.buffer = manager.to_executorch(ExecutorchBackendConfig(passes=passes)).buffer

    def check(self, *calls):
        """Equal to eager torch at every one of successive calls."""
        program = Runtime.get().load_program(self.buffer)
        method = program.load_method("forward")
        for inputs in calls:
            with torch.no_grad():
                expected = self.eager(*inputs)
            expected = expected if isinstance(expected, tuple) else (expected,)
            torch.testing.assert_close(tuple(method.execute(list(inputs))), expected, equal_nan=True)

    @property
    def refused(self):
        return {d.target: d.reason for d in self.partitioner.explain().refused}


class Wrapped(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *inputs):
        return self.fn(*inputs)


def lowered(fn, *inputs, **options):
    return Program(Wrapped(fn), inputs, **options)


def test_an_unsupported_node_in_the_middle(delegate):
    """float64 is no dtype of MLX's: two delegates with a piece of ExecuTorch between them."""
    x = torch.randn(2, 3)
    program = lowered(lambda x: torch.exp((torch.sin(x).double() * 2).float()) + 1, x)
    assert program.delegates == 2
    assert any("float64" in reason for reason in program.refused.values())
    program.check((x,), (x * 2,))


def test_unsupported_first_and_last(delegate):
    x = torch.randn(5)
    program = lowered(lambda x: ((x.double() + 1).float() * 2).double(), x)
    assert program.delegates == 1
    program.check((x,))


def test_nothing_supported(delegate):
    x = torch.randn(5, dtype=torch.float64)
    program = lowered(lambda x: x * 2 + 1, x)
    assert program.delegates == 0
    program.check((x,))


def test_a_size_that_is_data_stays(delegate):
    """The size of what `nonzero` found is asked on the host; nothing insists on its delegation."""
    x = torch.tensor([0.0, 2.0, 0.0, 3.0])
    program = lowered(lambda x: torch.nonzero(x), x)
    assert program.delegates == 0
    program.check((x,), (x + 1,), (torch.zeros(4),))


def test_a_boolean_index_stays(delegate):
    x, mask = torch.randn(5), torch.tensor([True, False, True, True, False])
    program = lowered(lambda x, mask: (x + 1)[mask] * 2, x, mask)
    assert program.refused


def test_independent_branches(delegate):
    """One branch stays: the delegate before it and the one after it may not become a cycle."""
    x, y = torch.randn(4), torch.randn(4)
    program = lowered(
        lambda x, y: ((x.exp().double() * 2).float() + y.exp(), (y * 2).sum() + x), x, y
    )
    program.check((x, y), (y, x))


def test_a_dynamic_dimension_across_the_border(delegate):
    n = torch.export.Dim("n", min=1, max=16)
    x = torch.randn(4, 3)
    program = lowered(
        lambda x: (x.exp().double() * 2).float().reshape(-1) + 1, x, dynamic_shapes=(({0: n},),)
    )
    program.check((x,), (torch.randn(1, 3),), (torch.randn(9, 3),))


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.full((3,), 2.0))

    def forward(self, x):
        self.count.add_(x)
        return (self.count.double() * 2).float() + 1


def test_a_buffer_that_both_sides_read(delegate):
    """Written by one side and read by the other: it stays with ExecuTorch."""
    x = torch.ones(3)
    program = Program(Counter(), (x,))
    program.check((x,), (x * 2,), (x * 3,))


class TwoReaders(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, x):
        return (x * self.weight).double().float() + self.weight.double().float() + self.weight * 2


def test_a_parameter_that_both_sides_read(delegate):
    x = torch.randn(3)
    Program(TwoReaders(), (x,)).check((x,))


def test_a_flag_without_a_lowering_is_refused(delegate):
    x = torch.randn(3, 4)
    program = lowered(lambda x: torch.var(x, 1, correction=0.5) + 1, x)
    assert "0.5" in program.refused.get("aten.var.correction", "")


def test_explain_names_node_target_and_reason(delegate):
    x = torch.randn(3)
    program = lowered(lambda x: (x.sin().double() + 1).float(), x)
    report = program.partitioner.explain()
    assert report.delegated >= 1 and report.refused
    first = report.refused[0]
    assert first.node in str(report) and first.target in str(report) and first.reason in str(report)
    assert str(report).startswith(f"{report.delegated} of {len(report.decisions)} nodes")


def test_explain_before_partitioning():
    with pytest.raises(RuntimeError, match="not partitioned"):
        MLXPartitioner().explain()


def test_what_is_spelled_out_passes_the_verifier(delegate):
    """exp2 and cumprod are not of the core ATen set: they are gone before it is looked at."""
    x = torch.randn(3, 4)
    program = lowered(lambda x: torch.exp2(x).cumprod(1), x)
    assert program.delegates == 1 and not program.refused
    program.check((x,), (x * 2,))


def test_a_text_that_would_fix_a_dynamic_extent_is_refused(delegate):
    """Doubling along an axis needs its extent; along the other it may be dynamic."""
    rows = torch.export.Dim("rows", min=2, max=8)
    exported = torch.export.export(
        Wrapped(lambda x: x.cumprod(0)), (torch.randn(3, 4),), dynamic_shapes=(({0: rows},),)
    )
    partitioner = MLXPartitioner()
    config = EdgeCompileConfig(_check_ir_validity=False)
    to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    (refused,) = partitioner.explain().refused
    assert refused.target == "aten.cumprod.default" and "dynamic extent" in refused.reason
    program = lowered(lambda x: x.cumprod(1), torch.randn(3, 4), dynamic_shapes=(({0: rows},),))
    assert not program.refused
    program.check((torch.randn(5, 4),))


def test_named_results_can_be_stored(delegate):
    x = torch.randn(3, 4)
    program = lowered(lambda x: torch.sort(x, dim=1), x)
    assert program.delegates == 1
    program.check((x,))


def test_extents_that_are_multiples(delegate):
    """What export knows of them besides is no reason to refuse a pool."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 5, stride=4, padding=2), torch.nn.MaxPool2d(3, 2), torch.nn.Conv2d(2, 2, 3, padding=1)
    )
    height, width = (torch.export.Dim(name, min=2, max=8) * 16 for name in ("height", "width"))
    x = torch.randn(1, 1, 96, 64)
    program = Program(model.eval(), (x,), dynamic_shapes=({2: height, 3: width},))
    assert program.delegates == 1 and not program.refused
    program.check((x,), (torch.randn(1, 1, 48, 112),))


def test_a_pool_in_ceil_mode_over_dynamic_extents(delegate):
    model = torch.nn.MaxPool2d(3, 2, ceil_mode=True)
    height, width = (torch.export.Dim(name, min=2, max=8) * 2 for name in ("height", "width"))
    x = torch.randn(1, 2, 8, 12)
    program = Program(model, (x,), dynamic_shapes=({2: height, 3: width},))
    assert program.delegates == 1 and not program.refused
    program.check((x,), (torch.randn(1, 2, 14, 4),))


def test_what_was_exported_stays_whole(delegate):
    """Its constants too, which the delegate takes over."""
    x = torch.randn(3)
    exported = torch.export.export(Wrapped(lambda x: x + torch.tensor([1.0, 2.0, 3.0])), (x,))
    to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch()
    torch.testing.assert_close(exported.module()(x), x + torch.tensor([1.0, 2.0, 3.0]))
