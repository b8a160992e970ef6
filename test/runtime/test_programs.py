"""`executorch_mlx.Runtime`: what its programs and methods do beyond those of ExecuTorch."""

import gc
import weakref

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime
from irprograms import Graph, ir, pte


class Square(torch.nn.Module):
    """The weight makes the method read the memory of its program, and MLX runs no float64."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(64.0))

    def forward(self, x):
        return (x.double() * x.double()).float() + self.weight[: x.shape[-1]]


def program_bytes(module, *inputs):
    exported = torch.export.export(module, inputs)
    return bytes(to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch().buffer)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("square") / "square.pte"
    path.write_bytes(program_bytes(Square(), torch.ones(4)))
    return path


@pytest.mark.parametrize("read", [lambda path: path.read_bytes(), str, lambda path: path.open("rb")])
def test_a_method_keeps_its_program(path, read):
    method = Runtime.get().load_program(read(path)).load_method("forward")
    gc.collect()
    fill = [bytes(range(256)) * 64 for _ in range(100)]
    for call in (method, Runtime.get().load_program(read(path)).load_method("forward")):
        assert torch.equal(call.execute([torch.ones(4)])[0], 1 + torch.arange(4.0))
    assert fill
    assert torch.equal(
        Runtime.get().load_program(read(path)).load_method("forward").execute([torch.ones(4)])[0], 1 + torch.arange(4.0)
    )


def test_a_program_is_freed_without_the_garbage_collector(path):
    gc.disable()
    try:
        program = Runtime.get().load_program(path)
        method = program.load_method("forward")
        references = [weakref.ref(program), weakref.ref(method)]
        del program
        assert references[0]() is None
        method.execute([torch.ones(4)])
        del method
        assert references[1]() is None
    finally:
        gc.enable()


def test_an_error_contains_the_line_of_the_delegate(capfd):
    g = Graph()
    x, index = g.input((2,)), g.input((1,), torch.int64)
    g.emit(ir.TakeNode(x=x, index=ir.IntOrVidOrTid(tid=index, kind=2), axis=0, out=g.output((1,))))
    method = Runtime.get().load_program(pte({"forward": g})).load_method("forward")
    with pytest.raises(RuntimeError, match=r"(?s)error 0x.*\nMLX execute: .*index 9 is out of range \[-2, 2\)"):
        method.execute([torch.ones(2), torch.tensor([9])])
    assert "index 9 is out of range" in capfd.readouterr().err  # the log has the line too
    assert method.execute([torch.ones(2), torch.tensor([1])])[0].tolist() == [1]


def test_an_error_contains_the_line_of_executorch(path):
    method = Runtime.get().load_program(path).load_method("forward")
    with pytest.raises(RuntimeError, match="Expected shape .4., but received .9."):
        method.execute([torch.ones(9)])
    with pytest.raises(RuntimeError, match="Expected 1, but got 0") as error:
        method.execute([])
    assert "Expected shape" not in str(error.value)  # a line of the error before


def test_a_load_error_contains_the_line(path):
    with pytest.raises(RuntimeError, match="\n"):
        Runtime.get().load_program(path.read_bytes()[:200])


class AddOne(torch.nn.Module):
    def forward(self, x):
        return x + 1


CONTIGUOUS = torch.arange(24.0).reshape(1, 2, 3, 4)
CHANNELS_LAST = CONTIGUOUS.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "expected, passed, message",
    [
        (CONTIGUOUS, CHANNELS_LAST, r"forward: input 0: got strides .* expected a contiguous tensor"),
        (CHANNELS_LAST, CONTIGUOUS, r"forward: input 0: got strides .* expected a tensor with the axes \(0, 2, 3, 1\)"),
        (CONTIGUOUS, CONTIGUOUS.mT.contiguous().mT, r"expected a contiguous tensor"),
        (CONTIGUOUS, torch.ones(1, 2, 3, 1).expand(1, 2, 3, 4), r"expected a contiguous tensor"),
    ],
)
def test_an_input_in_another_memory_format_is_refused(expected, passed, message):
    method = Runtime.get().load_program(program_bytes(AddOne(), expected)).load_method("forward")
    with pytest.raises(RuntimeError, match=message):
        method.execute([passed])
    assert torch.equal(method.execute([expected])[0], expected + 1)


def test_formats_that_agree_in_memory_are_accepted():
    """With one channel, a channels-last tensor has the elements in the order of a contiguous one."""
    x = torch.arange(12.0).reshape(1, 1, 3, 4)
    method = Runtime.get().load_program(program_bytes(AddOne(), x)).load_method("forward")
    assert torch.equal(method.execute([x.to(memory_format=torch.channels_last)])[0], x + 1)
