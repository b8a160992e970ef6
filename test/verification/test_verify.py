"""`executorch_mlx.verify`: correct programs pass; for wrong ones, the report names the first departure."""

import pytest
import torch
from broken_lowering import scaled_constant
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, verify

pytestmark = pytest.mark.usefixtures("delegate")


def compiled(module, inputs, *, dynamic_shapes=None, partitioner=None) -> bytes:
    exported = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
    lowered = to_edge_transform_and_lower(
        exported,
        partitioner=[partitioner or MLXPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    return bytes(lowered.to_executorch().buffer)


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 3, stride=2)
        self.norm, self.classifier = torch.nn.BatchNorm2d(8), torch.nn.Linear(4, 5)

    def forward(self, x):
        x = torch.nn.functional.gelu(self.norm(self.first(x)))
        return self.classifier(self.second(x).mean((2, 3))).softmax(-1)


class Recurrent(torch.nn.Module):
    """An LSTM cell whose state is in buffers."""

    def __init__(self):
        super().__init__()
        self.gates = torch.nn.Linear(8 + 6, 4 * 6)
        self.register_buffer("hidden", torch.zeros(2, 6))
        self.register_buffer("cell", torch.zeros(2, 6))

    def forward(self, x):
        i, f, g, o = self.gates(torch.cat((x, self.hidden), -1)).chunk(4, -1)
        cell = f.sigmoid() * self.cell + i.sigmoid() * g.tanh()
        self.cell.copy_(cell)
        self.hidden.copy_(o.sigmoid() * cell.tanh())
        return self.hidden + 0


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)), y.argmax(-1)


def quantized_linear():
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
    quantize_(module, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    return module


CORRECT_PROGRAMS = {
    "convolutions": lambda: (Convolutions().eval(), (torch.randn(2, 3, 12, 12),)),
    "half precision": lambda: (Convolutions().eval().to(torch.bfloat16), (torch.randn(2, 3, 12, 12).bfloat16(),)),
    "attention": lambda: (Attention().eval(), (torch.randn(2, 5, 16),)),
    "quantized": lambda: (quantized_linear(), (torch.randn(3, 64),)),
}


@pytest.mark.parametrize("make", CORRECT_PROGRAMS.values(), ids=CORRECT_PROGRAMS)
def test_correct_program_passes(make):
    module, inputs = make()
    report = verify(compiled(module, inputs), module, inputs)
    assert report.ok and report.departure is None, report
    assert str(report).startswith("the program agrees with eager torch")


def test_several_calls_share_buffers_and_leave_those_of_the_module_unchanged(tmp_path):
    module = Recurrent().eval()
    calls = [(torch.randn(2, 8),) for _ in range(4)]
    file = tmp_path / "model.pte"
    file.write_bytes(compiled(module, calls[0]))
    report = verify(file, module, calls)
    assert report.ok and [check.call for check in report.outputs] == [0, 1, 2, 3], report
    assert torch.count_nonzero(module.cell) == 0


def test_dynamic_shape():
    module = Attention().eval()
    shapes = ({1: torch.export.Dim("n", min=1, max=32)},)
    pte = compiled(module, (torch.randn(2, 5, 16),), dynamic_shapes=shapes)
    calls = [(torch.randn(2, n, 16),) for n in (5, 9, 1)]
    assert verify(pte, module, calls).ok
    other = Attention().eval()
    report = verify(pte, other, calls, dynamic_shapes=shapes)
    assert not report.ok and report.departure.op == "AddmmNode" and report.departure.call == 0, report
    report = verify(pte, other, calls)  # exported again without dynamic shapes, which gives another graph
    assert report.departure is None and "was not compiled from this graph" in report.note


# Broken programs ---------------------------------------------------------------------------


def test_departure_names_the_instruction_of_a_scaled_constant():
    module, inputs = Convolutions().eval(), (torch.randn(2, 3, 12, 12),)
    with scaled_constant("classifier.bias"):
        pte = compiled(module, inputs)
    report = verify(pte, module, inputs)
    departure = report.departure
    assert not report.ok and departure.op == "AddmmNode" and "bias=classifier.bias" in departure.listing, report
    assert departure.target == "aten.linear.default"
    assert "self.classifier(self.second(x)" in departure.source and "test_verify.py" in departure.source
    assert "DIFFERS" in str(report) and departure.listing.strip() in str(report)


def test_departure_in_a_module_with_state():
    module, calls = Recurrent().eval(), [(torch.randn(2, 8),) for _ in range(2)]
    with scaled_constant("gates.bias"):
        pte = compiled(module, calls[0])
    report = verify(pte, module, calls)
    assert report.departure.call == 0 and "gates.bias" in report.departure.listing, report


def test_departure_in_a_partly_delegated_program():
    class TwoParts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x).double().exp().float()).tanh()

    module, inputs = TwoParts().eval(), (torch.randn(3, 4),)
    partitioner = MLXPartitioner()
    with scaled_constant("b.bias"):
        pte = compiled(module, inputs, partitioner=partitioner)
    assert partitioner.explain().refused
    report = verify(pte, module, inputs)
    assert report.departure.delegate == 1 and "b.bias" in report.departure.listing, report


def test_wrong_module_is_reported():
    inputs = (torch.randn(3, 4),)
    pte = compiled(torch.nn.Linear(4, 4).eval(), inputs)
    report = verify(pte, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).eval(), inputs)
    assert not report.ok and report.departure is None
    assert "was not compiled from this graph" in report.note
    report = verify(pte, torch.nn.Linear(4, 2).eval(), inputs)
    assert not report.ok and report.outputs[0].comparison.mismatch == "got shape [3, 4], expected [3, 2]"
    assert report.departure is None and "the intermediate values cannot be compared" in report.note


def test_an_exported_program_is_accepted():
    inputs = (torch.randn(3, 4),)
    module = torch.nn.Linear(4, 4).eval()
    pte = compiled(module, inputs)
    assert verify(pte, torch.export.export(module, inputs), inputs).ok
    other = verify(pte, torch.export.export(torch.nn.Linear(4, 4).eval(), inputs), inputs)
    assert other.departure.op == "AddmmNode"


def test_keyword_arguments():
    from executorch_mlx import SamplingHead

    model = SamplingHead(torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100))).eval()
    tokens, kwargs = torch.tensor([[1, 2, 3]]), {"temperature": torch.tensor(0.8), "seed": torch.tensor(7)}
    exported = torch.export.export(model, (tokens,), kwargs)
    pte = bytes(to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch().buffer)
    assert verify(pte, model, (tokens,), kwargs).ok


LINEAR = torch.nn.Linear(4, 4).eval()


@pytest.mark.parametrize(
    "pte, module, inputs, kwargs, error, message",
    [
        (7, LINEAR, (torch.ones(1, 4),), None, TypeError, "verify: pte: got int, expected a path or the bytes"),
        ("/nowhere.pte", LINEAR, (torch.ones(1, 4),), None, FileNotFoundError, "/nowhere.pte"),
        (b"", "model", (torch.ones(1, 4),), None, TypeError, "verify: module: got str, expected a torch.nn.Module"),
        (b"", torch.nn.Linear(4, 4), (torch.ones(1, 4),), None, ValueError, "verify: module: it is in training mode"),
        (b"", LINEAR, torch.ones(1, 4), None, TypeError, "verify: inputs: got Tensor, expected a tuple"),
        (b"", LINEAR, [torch.ones(1, 4)], None, TypeError, "verify: inputs: got Tensor, expected a tuple"),
        (b"", LINEAR, [], None, ValueError, "verify: inputs: got an empty list"),
        (b"", LINEAR, (torch.ones(1, 4),), [1], TypeError, "verify: kwargs: got list, expected a dict"),
    ],
)
def test_wrong_argument(pte, module, inputs, kwargs, error, message):
    with pytest.raises(error, match=message):
        verify(pte, module, inputs, kwargs)
