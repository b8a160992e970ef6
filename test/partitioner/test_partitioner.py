"""Programs that run partly on MLX and partly on ExecuTorch's own kernels. `explain()` says why."""

import pytest
import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch_mlx import MLXPartitioner
from function_module import Function
from loaded_method import LoadedMethod
from torch.nn import functional as F


class Lowered:
    """A lowered module: the number of its delegates, the refused nodes, and the program."""

    def __init__(self, module, inputs, dynamic_shapes=None):
        self.module = module
        exported = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
        self.partitioner = MLXPartitioner()
        manager = to_edge_transform_and_lower(exported, partitioner=[self.partitioner])
        self.delegates = sum(
            n.target is torch.ops.higher_order.executorch_call_delegate for n in manager.exported_program().graph.nodes
        )
        self.refused = {d.target: d.reason for d in self.partitioner.explain().refused}
        buffers = [name for name, _ in module.named_buffers()]
        # Without this pass, the buffers that stay with ExecuTorch start from zeros.
        passes = [InitializedMutableBufferPass(buffers)] if buffers else []
        self.pte = manager.to_executorch(ExecutorchBackendConfig(passes=passes)).buffer

    def assert_matches_eager(self, *calls):
        """Run successive calls, each a tuple of inputs, and compare the results with those of eager torch."""
        method = LoadedMethod(self.pte)
        assert calls
        for inputs in calls:
            with torch.no_grad():
                expected = self.module(*inputs)
            expected = tuple(expected) if isinstance(expected, (tuple, list)) else (expected,)
            torch.testing.assert_close(tuple(method.execute(list(inputs))), expected, equal_nan=True)


def lower(function, *inputs, **options):
    return Lowered(Function(function), inputs, **options)


# An exponential in float64, and the casts before and after it, stay with ExecuTorch.


def test_exponential_in_float64_of_half_precision(delegate):
    lowered = lower(lambda x: x.half().float().double().exp().float(), torch.randn(3))
    assert any("float64" in reason for reason in lowered.refused.values())
    lowered.assert_matches_eager((torch.randn(3),))


def test_operators_in_an_undelegated_branch_are_decomposed(delegate):
    """`silu` is preserved for MLX, but ExecuTorch has no kernel for it."""

    def branches(x):
        return torch.cond(x.sum() > 0, lambda x: F.silu(x).double().sum(), lambda x: -x.double().mean(), (x,))

    x = torch.ones(2, 3)
    lowered = lower(branches, x)
    assert "cond" in lowered.refused
    lowered.assert_matches_eager((x,), (-x,))


def test_unsupported_node_in_the_middle_splits_the_delegate(delegate):
    x = torch.randn(2, 3)
    lowered = lower(lambda x: torch.exp(torch.sin(x).double().exp().float()) + 1, x)
    assert lowered.delegates == 2
    assert any("float64" in reason for reason in lowered.refused.values())
    lowered.assert_matches_eager((x,), (x * 2,))


def test_unsupported_nodes_first_and_last(delegate):
    x = torch.randn(5)
    lowered = lower(lambda x: (x.double().exp().float() * 2).double(), x)
    assert lowered.delegates == 1
    lowered.assert_matches_eager((x,))


def test_no_supported_node(delegate):
    x = torch.randn(5, dtype=torch.float64)
    lowered = lower(lambda x: x * 2 + 1, x)
    assert lowered.delegates == 0
    lowered.assert_matches_eager((x,))


def test_nonzero_is_not_delegated(delegate):
    """The size of the result depends on the data."""
    x = torch.tensor([0.0, 2.0, 0.0, 3.0])
    lowered = lower(lambda x: torch.nonzero(x), x)
    assert lowered.delegates == 0 and "aten.nonzero.default" in lowered.refused
    lowered.assert_matches_eager((x,), (x + 1,), (torch.zeros(4),))


MATRIX = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 5.0], [0.0, 0.0, 3.0], [0.0, 4.0, 0.0]])


@pytest.mark.parametrize(
    "function", [torch.nonzero, torch.argwhere, torch.where, lambda x: x.nonzero(as_tuple=True)[1]]
)
@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3)], ids=str)
def test_indices_of_nonzero_elements(delegate, function, shape):
    """ExecuTorch's kernel writes row after row, but torch.export records that the result is column-major."""
    x = MATRIX.reshape(shape)
    lowered = lower(function, x, dynamic_shapes=(({0: torch.export.Dim("rows", min=0, max=4)},),))
    assert lowered.refused.keys() == {"aten.nonzero.default"}
    lowered.assert_matches_eager((x,), (x[1:],), (x * 0,), (x + 1,), (x[:0],))


def test_indices_that_executorch_misreads_are_not_delegated(delegate):
    """`to_edge` decomposes the program before the partitioner could change it."""
    partitioner = MLXPartitioner()
    edge = to_edge(torch.export.export(Function(lambda x: torch.nonzero(x)[:, 1] * 2), (MATRIX,)))
    edge.to_backend(partitioner)
    reasons = {d.target: d.reason for d in partitioner.explain().refused}
    assert reasons.keys() == {"aten.nonzero.default", "aten.select_copy.int"}
    assert "to_edge_transform_and_lower" in reasons["aten.select_copy.int"]


def test_boolean_index_is_not_delegated(delegate):
    x, mask = torch.randn(5), torch.tensor([True, False, True, True, False])
    lowered = lower(lambda x, mask: (x + 1)[mask] * 2, x, mask)
    assert lowered.delegates >= 1 and "aten.index.Tensor" in lowered.refused
    lowered.assert_matches_eager((x, mask), (x, ~mask))


def test_delegates_around_an_unsupported_branch_form_no_cycle(delegate):
    x, y = torch.randn(4), torch.randn(4)
    lowered = lower(lambda x, y: (x.sin().double().exp().float() + y.exp(), (y * 2).sum() + x), x, y)
    assert lowered.delegates >= 1 and lowered.refused
    lowered.assert_matches_eager((x, y), (y, x))


def test_dynamic_shape_between_delegates(delegate):
    n = torch.export.Dim("n", min=1, max=16)
    x = torch.randn(4, 3)
    lowered = lower(lambda x: x.sin().double().exp().float().reshape(-1) + 1, x, dynamic_shapes=(({0: n},),))
    assert lowered.delegates == 2
    lowered.assert_matches_eager((x,), (torch.randn(1, 3),), (torch.randn(9, 3),))


def test_batch_of_convolutions_may_have_the_declared_size(delegate):
    """torch selects a kernel for a convolution by whether the batch is less than 16."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.Conv2d(3, 2, 1)).eval()
    lowered = Lowered(model, (torch.randn(4, 2, 3, 5),), ({0: torch.export.Dim("batch", min=1, max=20)},))
    assert lowered.delegates == 1 and not lowered.refused
    lowered.assert_matches_eager(*((torch.randn(batch, 2, 3, 5),) for batch in (1, 4, 16, 20)))


def test_extents_that_follow_from_a_dynamic_size_of_1(delegate):
    """torch assumes that the dynamic size n is at least 2, and therefore that 2 * n is at least 4."""
    n = torch.export.Dim("n", min=1, max=5)
    x, y = torch.randn(6, 2), torch.randn(4, 2)
    lowered = lower(lambda x, y: (x.reshape(-1, 4) + 1, y * 2), x, y, dynamic_shapes=(({0: 2 * n}, {0: n + 1}),))
    assert lowered.delegates == 1
    lowered.assert_matches_eager((x, y), (x[:2], y[:2]), (torch.randn(10, 2), torch.randn(6, 2)))


def test_checks_of_elements_are_left_out(delegate):
    """torch.export makes `torch.sym_ite` of them, which ExecuTorch refuses."""

    def checked(x, mask):
        torch._check_tensor_all(mask.sum() == x.shape[0], lambda: "the mask has another number of elements")
        torch._check_tensor_all(x.abs() < 100)
        return x.masked_fill(mask, 0.0) + x

    x, mask = torch.randn(3), torch.ones(3, dtype=torch.bool)
    lowered = lower(checked, x, mask)
    assert lowered.delegates == 1 and not lowered.refused
    lowered.assert_matches_eager((x, mask))


# Data that nodes of both MLX and ExecuTorch use -------------------------------------------


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.full((3,), 2.0))

    def forward(self, x):
        self.count.add_(x)
        return self.count.double().exp().float() + 1


def test_broadcast_into_a_buffer_that_was_written_before(delegate):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.ones(3, 4))

        def forward(self, x):
            self.state.mul_(2)
            self.state.copy_(x[:1])
            return self.state + 1

    lowered = Lowered(Model(), (torch.randn(3, 4),))
    lowered.assert_matches_eager((torch.randn(3, 4),), (torch.randn(3, 4),))


def test_shared_buffer_stays_with_executorch(delegate):
    x = torch.ones(3)
    lowered = Lowered(Counter(), (x,))
    assert lowered.delegates >= 1 and lowered.refused
    lowered.assert_matches_eager((x,), (x * 2,), (x * 3,))


class SharedWeight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.weight + self.weight.double().exp().float() + self.weight * 2


def test_shared_parameter_stays_with_executorch(delegate):
    x = torch.randn(3)
    lowered = Lowered(SharedWeight(), (x,))
    assert lowered.delegates >= 1 and lowered.refused
    lowered.assert_matches_eager((x,), (x * 2,))


class ReturnedParameter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.weight, x * self.weight


def test_returned_parameter_stays_with_executorch(delegate):
    x = torch.randn(3)
    lowered = Lowered(ReturnedParameter(), (x,))
    assert lowered.delegates == 1 and not lowered.refused
    lowered.assert_matches_eager((x,), (x * 2,))


def test_condition_for_an_undelegated_branch_is_not_delegated(delegate):
    """ExecuTorch takes no condition from a delegate."""

    def branches(x):
        y = x.exp()
        return torch.cond(x.shape[0] > 4, lambda y: y.double().float() + 1, lambda y: y * 2, (y,))

    x = torch.randn(4, 3)
    lowered = lower(branches, x, dynamic_shapes=(({0: torch.export.Dim("n", min=2, max=8)},),))
    assert lowered.delegates == 1 and "condition" in lowered.refused["operator.gt"]
    lowered.assert_matches_eager((x,), (torch.randn(5, 3),))


def test_exported_program_still_runs_after_lowering():
    """The exported program keeps its constants, although the delegate takes them over."""
    x = torch.randn(3)
    exported = torch.export.export(Function(lambda x: x + torch.tensor([1.0, 2.0, 3.0])), (x,))
    to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch()
    torch.testing.assert_close(exported.module()(x), x + torch.tensor([1.0, 2.0, 3.0]))


# Reports ---------------------------------------------------------------------------------


def test_unsupported_argument_is_named_in_the_reason(delegate):
    x = torch.randn(3, 4)
    lowered = lower(lambda x: torch.var(x, 1, correction=0.5) + 1, x)
    assert lowered.delegates == 1
    assert "0.5" in lowered.refused["aten.var.correction"]
    lowered.assert_matches_eager((x,))


def test_explain_gives_node_target_and_reason(delegate):
    x = torch.randn(3)
    lowered = lower(lambda x: x.sin().double().exp().float(), x)
    report = lowered.partitioner.explain()
    assert report.delegated >= 1 and report.refused
    first = report.refused[0]
    assert first.node in str(report) and first.target in str(report) and first.reason in str(report)
    assert str(report).startswith(f"{report.delegated} of {len(report.decisions)} nodes")
    lowered.assert_matches_eager((x,))


def test_a_function_of_python_is_named_in_the_report():
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * (x.shape[0] / 3)

    shapes = ({0: torch.export.Dim("n", min=2, max=9)},)
    exported = torch.export.export(Scaled(), (torch.ones(4),), dynamic_shapes=shapes)
    partitioner = MLXPartitioner()
    to_edge_transform_and_lower(exported, partitioner=[partitioner])
    (refused,) = partitioner.explain().refused
    assert refused.target == "operator.truediv"
    assert refused.reason.startswith("a symbolic float is unsupported")


def test_explain_before_partitioning_raises():
    with pytest.raises(RuntimeError, match="not partitioned"):
        MLXPartitioner().explain()


# Decomposition before lowering -----------------------------------------------------------


def test_decomposed_operators_pass_the_verifier_of_executorch(delegate):
    """exp2 and cumprod are not core ATen operators. They are decomposed before ExecuTorch verifies the program."""
    x = torch.randn(3, 4)
    lowered = lower(lambda x: torch.exp2(x).cumprod(1), x)
    assert lowered.delegates == 1 and not lowered.refused
    lowered.assert_matches_eager((x,), (x * 2,))


def test_lowering_that_restricts_a_dynamic_dimension_is_refused(delegate):
    """The decomposition of unfold needs at least 3 elements on the unfolded axis. Other axes may have any size."""
    rows = torch.export.Dim("rows", min=2, max=8)
    exported = torch.export.export(
        Function(lambda x: x.unfold(0, 2, 1)), (torch.randn(4, 4),), dynamic_shapes=(({0: rows},),)
    )
    partitioner = MLXPartitioner()
    config = EdgeCompileConfig(_check_ir_validity=False)
    to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    (refused,) = partitioner.explain().refused
    assert refused.target == "aten.unfold_copy.default"
    assert "restrict the dynamic dimension" in refused.reason and "[0, 8] to [3, 8]" in refused.reason
    lowered = lower(lambda x: x.unfold(1, 2, 1), torch.randn(3, 4), dynamic_shapes=(({0: rows},),))
    assert not lowered.refused
    lowered.assert_matches_eager((torch.randn(5, 4),))


def _cumulative(name):
    """Return a function that applies `torch.<name>` along axis 0 and returns a tensor or a tuple of tensors."""

    def cumulate(x):
        y = getattr(torch, name)(x, 0)
        return y if isinstance(y, torch.Tensor) else tuple(y)

    return cumulate


@pytest.mark.parametrize("function", ["cumprod", "cummax", "logcumsumexp"])
def test_cumulative_operator_over_a_dynamic_dimension(delegate, function):
    rows = torch.export.Dim("rows", min=1, max=64)
    lowered = lower(_cumulative(function), torch.randn(7, 4), dynamic_shapes=(({0: rows},),))
    assert not lowered.refused
    for count in (1, 2, 8, 33, 64):
        lowered.assert_matches_eager((torch.randn(count, 4),))


@pytest.mark.parametrize("function", ["cumprod", "cummax", "logcumsumexp"])
def test_cumulative_operator_of_an_empty_tensor(delegate, function):
    lowered = lower(_cumulative(function), torch.randn(0, 4))
    lowered.assert_matches_eager((torch.randn(0, 4),))


# Outputs and dynamic shapes --------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.chunk(2, -1),
        lambda x: x.split([1, 3], 1),
        lambda x: x.chunk(3),
        lambda x: x.split([2, x.shape[0] - 2]),
    ],
    ids=["chunk", "split", "chunk-rows", "split-rows"],
)
def test_parts_with_a_dynamic_first_dimension(delegate, function):
    """ExecuTorch's verifier takes the length of the first part, which made the dimension static."""
    x = torch.ones(6, 4)
    rows = torch.export.Dim("rows", min=1, max=4)
    lowered = lower(lambda x: function(x + 1), x, dynamic_shapes=(({0: 3 * rows},),))
    assert (lowered.delegates, lowered.refused) == (1, {})
    lowered.assert_matches_eager((x,), (-torch.randn(12, 4) - 1,))


def test_named_tuple_as_output(delegate):
    x = torch.randn(3, 4)
    lowered = lower(lambda x: torch.sort(x, dim=1), x)
    assert lowered.delegates == 1
    lowered.assert_matches_eager((x,))


def test_pool_over_dynamic_multiples_of_16(delegate):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 5, stride=4, padding=2), torch.nn.MaxPool2d(3, 2), torch.nn.Conv2d(2, 2, 3, padding=1)
    )
    height, width = (torch.export.Dim(name, min=2, max=8) * 16 for name in ("height", "width"))
    x = torch.randn(1, 1, 96, 64)
    lowered = Lowered(model.eval(), (x,), dynamic_shapes=({2: height, 3: width},))
    assert lowered.delegates == 1 and not lowered.refused
    lowered.assert_matches_eager((x,), (torch.randn(1, 1, 48, 112),))


def test_pool_in_ceil_mode_over_dynamic_sizes(delegate):
    model = torch.nn.MaxPool2d(3, 2, ceil_mode=True)
    height, width = (torch.export.Dim(name, min=2, max=8) * 2 for name in ("height", "width"))
    x = torch.randn(1, 2, 8, 12)
    lowered = Lowered(model, (x,), dynamic_shapes=({2: height, 3: width},))
    assert lowered.delegates == 1 and not lowered.refused
    lowered.assert_matches_eager((x,), (torch.randn(1, 2, 14, 4),))


@pytest.mark.parametrize(
    "function, operator, advice",
    [
        (lambda x: torch.fft.rfft(x).abs(), "_fft_r2c", "pass torch.view_as_real(x)"),
        (lambda x: torch.linalg.svdvals(x), "_linalg_svd", "compute it at export"),
        (lambda x: torch.nonzero(x), "nonzero", "topk with a fixed count"),
    ],
)
def test_a_declined_node_has_advice(function, operator, advice):
    partitioner = MLXPartitioner()
    program = torch.export.export(Function(function), (torch.eye(3),))
    partitioner.partition(program.run_decompositions())
    (reason,) = {d.reason for d in partitioner.explain().refused if operator in d.target}
    assert advice in reason
