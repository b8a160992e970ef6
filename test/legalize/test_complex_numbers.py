"""Complex tensors: `legalize=("complex",)` replaces them by pairs of real tensors."""

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.legalize.complex_numbers import with_real_numbers
from function_module import Function
from loaded_method import LoadedMethod

view_as_complex, view_as_real = torch.view_as_complex, torch.view_as_real


def generate(*shape, dtype=torch.complex64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


# Functions of two complex tensors of shape [2, 3, 4] and a real one of this shape. The results are complex or real.
FUNCTIONS = {
    "arithmetic": lambda a, b, r: (a + b) * a - b * r + r / 2 - r * (1 + 2j) + (1 - a),
    "quotients": lambda a, b, r: a / b + r / a + b / r + a / 2,
    "reciprocal of a number that is large": lambda a, b, r: 1 / (a * 1e25) * 1e25,
    "products of matrices": lambda a, b, r: a @ b.mT + torch.einsum("bij,bkj->bik", a, b),
    "polar form": lambda a, b, r: torch.polar(a.abs(), b.angle()) + torch.complex(r, r).exp() * torch.exp(1j * r),
    "absolute value": lambda a, b, r: (a * 1e30).abs() * 1e-30 + (b * 0).abs() + torch.complex(r / 0, r / 0).abs(),
    "parts": lambda a, b, r: a.real + b.conj().imag,
    "views": lambda a, b, r: a.flatten(1).unsqueeze(1).expand(2, 3, 12)[:, 1:].transpose(1, 2).reshape(4, 12),
    "joins": lambda a, b, r: torch.cat([a, torch.stack([b[:, 0], r[:, 1]], 1)], 1).roll(1, 1),
    "parts of a tensor": lambda a, b, r: sum(a.chunk(2, -1)) + b.unbind(-1)[1][..., None],
    "sums": lambda a, b, r: a.sum(1) + b.mean(1),
    "choice": lambda a, b, r: torch.where(r > 0, a, b) + torch.where(r < 0, a, 1.0),
    "casts": lambda a, b, r: (r.to(torch.complex64) + a).to(torch.complex64) * r.half(),
}

fft = torch.fft
HANN_WINDOW = torch.hann_window(6)

# Functions of the same tensors that compute Fourier transforms.
TRANSFORMS = {
    "fft": lambda a, b, r: fft.fft(a) + fft.fft(b, dim=1, norm="ortho") * fft.ifft(r, norm="forward"),
    "ifft of another length": lambda a, b, r: fft.ifft(a, n=3)[..., None] + fft.fft(b, n=6, dim=2)[..., None, :],
    "rfft": lambda a, b, r: fft.rfft(r, dim=1) * 2 + fft.rfft(r, n=3, dim=1, norm="forward"),
    "irfft": lambda a, b, r: fft.irfft(a) + fft.irfft(b, n=6) + fft.irfft(a, n=3, norm="ortho")[..., :1],
    "irfft of a longer spectrum": lambda a, b, r: fft.irfft(a, n=5, dim=1) + fft.irfft(a, n=5, dim=1, norm="forward"),
    "two dimensions": lambda a, b, r: fft.fft2(r) + fft.ifft2(a, norm="ortho"),
    "all dimensions": lambda a, b, r: fft.fftn(r) + fft.ifftn(a, dim=(0, 2)) + fft.fftn(a, s=(3, 4)),
    "real in two dimensions": lambda a, b, r: fft.irfft2(fft.rfft2(r, norm="ortho") * 2, s=(3, 4), norm="ortho"),
    "real in all dimensions": lambda a, b, r: fft.irfftn(fft.rfftn(r, dim=(1, 2)), dim=(1, 2)),
    "shift": lambda a, b, r: fft.fftshift(fft.fft(a), dim=-1) + fft.ifftshift(a),
    "stft": lambda a, b, r: torch.stft(r.flatten(1), 6, 2, window=HANN_WINDOW, return_complex=True),
    "stft with a shorter window": lambda a, b, r: torch.stft(
        r.flatten(), 7, 3, 4, window=HANN_WINDOW[:4], normalized=True, onesided=False, center=False, return_complex=True
    ),
    "stft of windows of ones": lambda a, b, r: torch.stft(r.flatten(), 8, win_length=5, return_complex=True).abs(),
}


class Functions(torch.nn.Module):
    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, a, b, r):
        results = [f(view_as_complex(a), view_as_complex(b), r) for f in self.functions.values()]
        return tuple(view_as_real(x) if x.is_complex() else x for x in results)


class Rotation(torch.nn.Module):
    """Rotates pairs of elements by the complex numbers of a parameter, a buffer and a constant."""

    def __init__(self):
        super().__init__()
        self.parameter = torch.nn.Parameter(generate(8, 3))
        self.register_buffer("table", generate(8, 3))
        self.constant = generate(8, 3)

    def forward(self, x):
        pairs = view_as_complex(x.unflatten(-1, (-1, 2)))
        rotated = pairs * (self.parameter * self.table + self.constant)[: x.shape[1]]
        return view_as_real(rotated).flatten(-2)


def lower(module, inputs, **options):
    """Return the lowered method, and the report of the partitioner."""
    exported = torch.export.export(module, inputs, **options)
    partitioner = MLXPartitioner(legalize=("complex",))
    manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    return LoadedMethod(bytes(manager.to_executorch().buffer)), partitioner.explain()


@pytest.mark.parametrize("functions", [FUNCTIONS, TRANSFORMS], ids=["operators", "transforms"])
def test_functions_of_complex_tensors(delegate, functions):
    a, b = (view_as_real(generate(2, 3, 4) * scale) for scale in (1, 0.5))
    inputs = a.clone(), b.flip(0).clone(), generate(2, 3, 4, dtype=torch.float32)
    module = Functions(functions)
    method, report = lower(module, inputs)
    assert not report.refused, str(report)
    expected = module(*inputs)
    for name, actual, wanted in zip(functions, method.execute(inputs), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("length", [6, 7, 8, 12, 100])
def test_frequencies_without_an_imaginary_part(delegate, length):
    """The phase of a real frequency is exactly 0 or pi. The imaginary part is exactly zero there, and not -0."""
    r = torch.rand(2, length, generator=torch.Generator().manual_seed(0))

    def function(r):
        return [fft.rfft(x).angle() for x in (r, -r, r.roll(1, -1) - r)] + [fft.rfft(r).imag, fft.fft(r).imag]

    method, _ = lower(Function(function), (r,))
    *phases, half, whole = method.execute([r])
    real = [0, length // 2] if length % 2 == 0 else [0]
    for actual, expected in zip(phases, function(r)):
        torch.testing.assert_close(actual[:, real[0]], expected[:, real[0]])
    assert not half[:, real].any() and not whole[:, real].any()
    torch.testing.assert_close(half, fft.rfft(r).imag, rtol=1e-5, atol=1e-5)


def test_complex_parameters_buffers_and_constants(delegate):
    module = Rotation().eval()
    length = torch.export.Dim("length", min=2, max=8)
    method, report = lower(module, (torch.randn(1, 5, 6),), dynamic_shapes=({1: length},))
    assert not report.refused, str(report)
    for size in (2, 8):
        x = torch.randn(1, size, 6)
        torch.testing.assert_close(method.execute([x])[0], module(x))


@pytest.mark.parametrize(
    "function, example",
    [
        (lambda x: x * 2, generate(3)),
        (lambda x: torch.complex(x, x), torch.randn(3)),
        (lambda x: torch.complex(x, x).tanh().abs(), torch.randn(3)),
    ],
    ids=["input", "output", "operator without a rule"],
)
def test_a_program_that_needs_complex_tensors_stays_as_it_is(function, example):
    program = torch.export.export(Function(function), (example,))
    assert with_real_numbers(program) is program


@pytest.mark.parametrize(
    "function, legalize, expected",
    [
        (
            lambda x: torch.polar(x, x).abs(),
            (),
            r'polar.*MLXPartitioner\(legalize=\("complex",\)\) computes with pairs',
        ),
        (lambda x: fft.rfft(x).abs(), (), r'r2c.*MLXPartitioner\(legalize=\("complex",\)\) computes with pairs'),
        (lambda x: torch.polar(x, x).tanh().abs(), (), r"polar.*no rule for aten.tanh.default \(tanh\)"),
        (
            lambda x: torch.polar(x, x).tanh().abs(),
            ("complex",),
            r"polar.*no rule for aten.tanh.default \(tanh\); let inputs and outputs be",
        ),
    ],
)
def test_complex_operators_inside_of_a_program_are_refused(function, legalize, expected):
    exported = torch.export.export(Function(function), (torch.randn(3),))
    with pytest.raises(ValueError, match=expected):
        to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner(legalize=legalize)])


def test_operators_that_executorch_has_stay_with_it(delegate):
    """A complex input cannot be replaced. ExecuTorch computes the sum, if its verifier is off."""
    x = generate(2, 3)
    exported = torch.export.export(Function(lambda x: (x + x).mT), (x,))
    partitioner = MLXPartitioner()
    config = EdgeCompileConfig(_check_ir_validity=False)
    with pytest.warns(UserWarning, match=r'add.*legalize=\("complex",\)'):
        manager = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    assert all('legalize=("complex",)' in d.reason for d in partitioner.explain().refused)
    torch.testing.assert_close(LoadedMethod(bytes(manager.to_executorch().buffer)).execute([x])[0], (x + x).mT)
