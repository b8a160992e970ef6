"""Programs that mean the same on ExecuTorch's own MLX delegate: lowered another way, reported or refused."""

import copy

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.cli.main import main
from executorch_mlx.inspect.portability import file_findings
from executorch_mlx.inspect.pte import read_payloads
from executorch_mlx.llm.export.serialize import PAGE, serialize
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.listing import list_replacements
from executorch_mlx.serialization.read import read_payload
from function_module import Function
from loaded_method import LoadedMethod

ANY_OPERATOR = EdgeCompileConfig(_check_ir_validity=False)
WEIGHTS = torch.arange(4.0)
I32, I64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)


def exported(function, inputs, dynamic_shapes=None):
    module = function if isinstance(function, torch.nn.Module) else Function(function)
    return torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic_shapes)


def lower(programs, **options):
    partitioner = MLXPartitioner(**options)
    manager = to_edge_transform_and_lower(programs, partitioner=[partitioner], compile_config=ANY_OPERATOR)
    return manager, partitioner.explain()


class State(torch.nn.Module):
    """Two buffers, of which one starts from zero."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.tensor([3.0, -1.0]))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.total.add_(x)
        self.calls.add_(1)
        return self.total * self.calls

    def read(self, x):
        return self.total + x


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def half(*shape):
    return torch.linspace(500, 900, torch.Size(shape).numel()).reshape(shape).half()


EXTREMES = ints(I64.max, I64.min + 1, -(10**18), 10**18 + 7, -7, 7, 0), ints(3, -7, 10**9 + 7, -2, 2, -2, 5)
EXTREMES_32 = (
    ints(I32.max, I32.min, I32.min, -7, 2**24 + 1, I32.max, dtype=torch.int32),
    ints(3, I32.max, 7, 2, 1, -1, dtype=torch.int32),
)

# Name → a function, its inputs, and the nodes of this runtime that replace portable instructions.
LOWERED_ANOTHER_WAY = {
    "condition": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)),
        (torch.ones(3),),
        {ir.ItemIntNode},
    ),
    "floor_divide": (lambda a, b: (a // b, a % b), EXTREMES, {ir.FloorDivideNode, ir.RemainderNode}),
    "floor_divide/int32": (lambda a, b: (a // b, a % b), EXTREMES_32, {ir.FloorDivideNode, ir.RemainderNode}),
    "floor_divide/uint8": (lambda a: (a // 16, a // 7), (torch.arange(256, dtype=torch.uint8),), {ir.FloorDivideNode}),
    "pow": (lambda a, b: a**b, (ints(2, 1, -1, -1, 3, 0), ints(-1, -5, -3, -2, 4, 0)), {ir.PowerNode}),
    "full": (lambda x: x + torch.full((3,), 2**24 + 1), (ints(1, 2, 3),), set()),
    "empty": (lambda x: (x + torch.zeros(0, 3), x[:, :0], torch.arange(x.shape[0] - 1)), (torch.ones(1, 3),), set()),
    "0-d": (lambda x: (x.argmax(0), x.softmax(0), x.argmin()), (torch.tensor(2.0),), {ir.ArgmaxNode}),
    "logsumexp": (lambda x: x.logsumexp((0, 1)), (torch.ones(2, 3),), set()),
    "half sums": (
        lambda x: (x.mean(1), x.std(1), x.sum(1) / 99),
        (half(2, 99),),
        {ir.MeanNode, ir.StdNode, ir.SumNode},
    ),
    "half gelu": (torch.nn.functional.gelu, (-half(2, 3) / 300,), {ir.GeluNode}),
    "half sigmoid": (
        lambda x: (x.sigmoid().log(), torch.nn.functional.silu(x)),
        (torch.tensor([-14.0, -12.0, -9.0, 3.0], dtype=torch.float16),),
        {ir.SigmoidNode, ir.SiluNode},
    ),
    "roll": (lambda x: x.roll(4), (torch.arange(6.0).view(2, 3),), set()),
    "step": (lambda x: x[:: 2**31 - 1], (torch.arange(6.0),), set()),
    "conv3d with groups": (torch.nn.Conv3d(4, 2, 2, groups=2), (torch.rand(1, 4, 3, 3, 3),), set()),
    "transposed conv with padding": (torch.nn.ConvTranspose1d(2, 3, 2, padding=3), (torch.rand(1, 2, 9),), set()),
    "erf": (torch.erf, (torch.tensor([0.0, -0.0, 0.5]),), {ir.ErfNode}),
    "update of a constant": (lambda i, v: WEIGHTS.index_copy(0, i, v), (ints(2, 0), torch.ones(2)), {ir.IndexCopyNode}),
    "scatter": (
        lambda x, i, s: x.scatter_add(0, i, s),
        (torch.zeros(4, 3), ints(1, 1, 2).view(1, 3), torch.ones(4, 3)),
        set(),
    ),
    "scatter in a corner": (
        lambda x, i, s: x.scatter_add(1, i, s),
        (torch.zeros(4, 3, 2), ints(1, 1, 2, 0).view(2, 2, 1), torch.rand(4, 3, 2)),
        {ir.ScatterAddNode},
    ),
    "channels-last output": (
        lambda x: (x + 1).contiguous(memory_format=torch.channels_last),
        (torch.rand(2, 3, 2, 4),),
        set(),
    ),
    "column-major output": (torch.linalg.inv, (torch.eye(3) * 4 + torch.rand(2, 3, 3),), set()),
    "initial value": (State(), (torch.ones(2),), {ir.NoopNode}),
}


@pytest.mark.parametrize("name", LOWERED_ANOTHER_WAY)
def test_lowered_another_way(name, delegate):
    function, inputs, nodes = LOWERED_ANOTHER_WAY[name]
    module = function if isinstance(function, torch.nn.Module) else Function(function)
    eager = copy.deepcopy(module)
    manager, report = lower(exported(module, inputs))
    program = manager.to_executorch()
    assert report.differences == ()
    assert file_findings(read_payloads(bytes(program.buffer))) == {}
    graphs = [read_payload(bytes(d.data)) for d in program.executorch_program.backend_delegate_data]
    assert nodes <= {type(i.node) for graph in graphs for i, _ in list_replacements(graph)}
    method = LoadedMethod(program.buffer)
    for _ in range(2):
        expected = eager(*inputs)
        actual = method.execute(list(inputs))
        for a, e in zip(actual, expected if isinstance(expected, tuple) else (expected,), strict=True):
            torch.testing.assert_close(a, e, equal_nan=True)
            assert a.dtype != torch.float32 or torch.equal(a.signbit(), e.signbit())


def test_dynamic_size_that_may_be_zero(delegate):
    def function(count):
        n = count.item()
        torch._check(n >= 0)
        torch._check(n <= 8)
        return torch.zeros(n, 2), torch.arange(n)

    manager, report = lower(exported(function, (torch.tensor(3),)))
    data = manager.to_executorch().buffer
    assert (report.differences, file_findings(read_payloads(bytes(data)))) == ((), {})
    method = LoadedMethod(data)
    for count in (0, 1, 5):
        zeros, numbers = method.execute([torch.tensor(count)])
        assert zeros.shape == (count, 2) and torch.equal(numbers, torch.arange(count))


NOT_PORTABLE = {
    "empty input": (lambda x: x * x, (torch.ones(0, 3),), "without elements"),
    "uint16": (lambda x: x.to(torch.float32), (torch.ones(3).to(torch.uint16),), "uint16 is unknown"),
    "channels-last input": (
        lambda x: x * x,
        (torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),),
        "must be row-major",
    ),
}


@pytest.mark.parametrize("name", NOT_PORTABLE)
def test_reported_or_not_delegated(name, delegate):
    function, inputs, reason = NOT_PORTABLE[name]
    manager, report = lower(exported(function, inputs))
    assert report.refused == () and reason in str(report.differences[0].problem)
    assert "not portable to ExecuTorch's own MLX delegate:" in str(report)
    assert file_findings(read_payloads(bytes(manager.to_executorch().buffer))) != {}

    manager, report = lower(exported(function, inputs), portable=True)
    assert report.differences == () and reason in report.refused[0].reason
    assert "executorch_call_delegate" not in str(manager.exported_program().graph)
    LoadedMethod(manager.to_executorch().buffer)  # ExecuTorch has kernels for what is left


def test_allowed_extensions_are_not_reported():
    _, report = lower(exported(torch.erfinv, (torch.rand(3),)), allow_extensions=True)
    assert report.differences == ()


def methods():
    x, state = torch.ones(2), State()
    forward = exported(state, (x,))
    state.forward = state.read
    return {"forward": forward, "read": exported(state, (x,))}


def test_methods_that_share_a_buffer():
    _, report = lower(methods())
    assert [(d.name, d.target, d.problem.kind) for d in report.differences] == [("total", "buffer", "shared_state")]
    with pytest.raises(RuntimeError, match=r"total: shared by methods forward, read here"):
        lower(methods(), portable=True)
    lower({"forward": methods()["forward"]}, portable=True)


def test_options_that_exclude_each_other():
    with pytest.raises(ValueError, match="allow_extensions and portable"):
        MLXPartitioner(allow_extensions=True, portable=True)


def test_command_prints_a_line_for_each_finding(tmp_path, capsys):
    file = tmp_path / "model.pte"
    file.write_bytes(lower(methods())[0].to_executorch().buffer)
    assert main(["inspect", "--portable", str(file)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("total: shared by methods forward, read here, but each method has its own there; ")
    assert main(["inspect", "--portable", "--method", "read", str(file)]) == 0
    assert capsys.readouterr().out == f"{file} is portable\n"


@pytest.mark.parametrize("portable", [False, True])
def test_constants_of_a_file_begin_at_pages(portable):
    manager, _ = lower(exported(torch.nn.Linear(8, 8), (torch.rand(2, 8),)), portable=portable)
    contents = read_payloads(bytes(serialize(manager).buffer))
    assert len(contents.named_data_offsets) == 2
    assert all(offset % PAGE == 0 for offset in contents.named_data_offsets.values())
