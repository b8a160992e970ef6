"""Constants in data files (`.ptd`), which ExecuTorch's pass `delegate_external_constants_pass_unlifted` selects."""

import re
import struct

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.passes.external_constants_pass import delegate_external_constants_pass_unlifted
from executorch_mlx import MLXPartitioner, Runtime
from loaded_method import LoadedMethod
from torch.ao.quantization.fx._decomposed import quantized_decomposed_lib  # noqa: F401  (registers its operators)
from torch.export import export


def lower(module, x, file):
    """Lower `module`. `file` maps the qualified name of a parameter or buffer to the name of its data file."""
    unlifted = export(module, (x,)).module()
    delegate_external_constants_pass_unlifted(unlifted, lambda node: file(node.target))
    return to_edge_transform_and_lower(export(unlifted, (x,)), partitioner=[MLXPartitioner()]).to_executorch()


def write(program, folder):
    """Write the data files of `program`. Return their names."""
    program.write_tensor_data_to_file(folder)
    return {path.name for path in folder.iterdir()}


class Base(torch.nn.Module):
    """The weights of the linear layer and of the convolution are stored in another layout than torch's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.conv = torch.nn.Linear(32, 32), torch.nn.Conv1d(32, 32, 3, padding=1)
        self.register_buffer("numbers", torch.randint(-8, 8, (32, 32), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(32))
        self.register_buffer("zeros", torch.zeros(32, dtype=torch.int64))

    def forward(self, x):
        weight = torch.ops.quantized_decomposed.dequantize_per_channel(
            self.numbers, self.scales, self.zeros, 0, -8, 7, torch.int8
        )
        return torch.nn.functional.linear(self.conv(self.linear(x).T).T, weight)


class Adapted(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.model = Base()
        torch.manual_seed(seed)
        self.adapter = torch.nn.Linear(32, 32)
        self.equal = torch.nn.Parameter(self.model.linear.bias.detach().clone())

    def forward(self, x):
        return self.model(x) + self.adapter(x) + self.equal


X = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


def test_two_programs_share_a_data_file(tmp_path):
    base = lower(Base(), X, lambda name: "base")
    assert write(base, tmp_path) == {"base.ptd"}
    assert len(base.buffer) < 5_000 < (tmp_path / "base.ptd").stat().st_size
    assert torch.allclose(LoadedMethod(base.buffer, data=tmp_path / "base.ptd").execute([X])[0], Base()(X), atol=1e-5)
    for seed in range(2):
        adapted = lower(Adapted(seed), X, lambda name: "base" if name.startswith("model") else None)
        method = LoadedMethod(adapted.buffer, data=tmp_path / "base.ptd")
        assert torch.allclose(method.execute([X])[0], Adapted(seed)(X), atol=1e-5)


def test_a_missing_data_file_is_named(capfd):
    with pytest.raises(RuntimeError):
        LoadedMethod(lower(Base(), X, lambda name: "base").buffer)
    assert '"base:' in (message := capfd.readouterr().err) and "neither in the program nor in a data file" in message


@pytest.mark.parametrize(
    "size, message", [(528, r"got 528 bytes, expected float32\[19,7\]"), (2**63, "cannot be read")]
)
def test_a_wrong_size_in_a_data_file_is_an_error(size, message, tmp_path, capfd):
    x = torch.ones(2, 7)
    program = lower(torch.nn.Linear(7, 19, bias=False), x, lambda name: "data")
    write(program, tmp_path)
    path = tmp_path / "data.ptd"
    data, right = path.read_bytes(), struct.pack("<Q", 19 * 7 * 4)
    at = data.rindex(right)  # behind the header, which also has the size of all data
    path.write_bytes(data[:at] + struct.pack("<Q", size) + data[at + len(right) :])
    with pytest.raises(RuntimeError):
        LoadedMethod(program.buffer, data=path)
    assert re.search(message, capfd.readouterr().err)


class Counter(torch.nn.Module):
    def __init__(self, sign):
        super().__init__()
        self.sign = sign
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("step", torch.arange(4.0))

    def forward(self, x):
        self.total.add_(x * self.step)
        return self.total * self.sign


def test_methods_with_a_data_file_share_their_buffers(tmp_path):
    x = torch.ones(4)
    counters = {"plus": Counter(1.0), "minus": Counter(-1.0)}
    counters["minus"].total, counters["minus"].step = counters["plus"].total, counters["plus"].step
    unlifted = {name: export(counter, (x,)).module() for name, counter in counters.items()}
    for module in unlifted.values():
        delegate_external_constants_pass_unlifted(module, lambda node: "data")
    programs = {name: export(module, (x,)) for name, module in unlifted.items()}
    program = to_edge_transform_and_lower(programs, partitioner=[MLXPartitioner()]).to_executorch()
    assert write(program, tmp_path) == {"data.ptd"}
    for _ in range(2):
        loaded = Runtime.get().load_program(program.buffer, data_path=tmp_path / "data.ptd")
        assert loaded.load_method("plus").execute([x])[0].tolist() == [0, 1, 2, 3]
        assert loaded.load_method("minus").execute([x])[0].tolist() == [0, -2, -4, -6]
