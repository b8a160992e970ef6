"""mlx::random_bits in eager torch against libmlx itself, bit for bit."""

import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import executorch_mlx.custom_ops  # noqa: F401

SEEDS = [0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, -1, -(2**63), -7]
COUNTS = [1, 2, 3, 4, 5, 7, 8, 31, 64, 255, 1001]
DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def bits(shape, seed=None, width=4):
    seed = None if seed is None else torch.tensor(seed)
    return torch.ops.mlx.random_bits(shape, seed, width)


@pytest.fixture(scope="module")
def libmlx_bits(tmp_path_factory):
    """Random bits of libmlx for (seed, width, count) requests, by a small C++ program."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "the tests need a C++20 compiler"
    home = Path(next(iter(mx.__path__ if hasattr(mx, "__path__") else [mx.__file__])))
    home = next(p for p in [home, *home.parents] if (p / "include" / "mlx").is_dir())
    program = tmp_path_factory.mktemp("oracle") / "random_bits"
    subprocess.run(
        [
            compiler, "-std=c++20", f"-I{home / 'include'}",
            str(Path(__file__).with_name("random_bits_oracle.cpp")), "-o", str(program),
            f"-L{home / 'lib'}", "-lmlx", f"-Wl,-rpath,{home / 'lib'}",
        ],
        check=True,
    )

    def draw(requests):
        lines = "".join(f"{seed} {width} {count}\n" for seed, width, count in requests)
        out = subprocess.run([program], input=lines.encode(), capture_output=True, check=True)
        return out.stdout

    return draw


@pytest.mark.parametrize("width", DTYPES)
def test_bits_of_libmlx(libmlx_bits, width):
    requests = [(seed, width, count) for seed in SEEDS for count in COUNTS]
    drawn = libmlx_bits(requests)
    for seed, _, count in requests:
        ours = bits([count], seed, width)
        assert ours.dtype == DTYPES[width]
        expected, drawn = drawn[: count * width], drawn[count * width :]
        assert ours.numpy().tobytes() == expected, (seed, width, count)
    assert not drawn


@pytest.mark.parametrize("seed", [s for s in SEEDS if s >= 0])
def test_words_and_uniforms_of_mlx_python(seed):
    key = mx.random.key(seed)
    words = np.array(mx.random.split(key, 500)).reshape(-1)
    np.testing.assert_array_equal(bits([1000], seed).numpy(), words)
    uniform = bits([33, 7], seed).float().mul(2.0**-32).clamp(max=1 - 2.0**-24)
    np.testing.assert_array_equal(uniform.numpy(), mx.random.uniform(shape=(33, 7), key=key))


def test_a_batch_is_one_row_of_numbers():
    torch.testing.assert_close(bits([4, 3, 5], 3), bits([60], 3).reshape(4, 3, 5))
    assert bits([], 3).shape == () and bits([0, 4], 3).shape == (0, 4)


def test_seed_of_one_element_counts_as_a_number():
    ones = torch.ops.mlx.random_bits([9], torch.tensor([5]))
    torch.testing.assert_close(ones, bits([9], 5))


def test_unseeded_draws_differ():
    assert len({bits([4]).numpy().tobytes() for _ in range(50)}) == 50


def test_refuses_other_widths_and_seeds():
    with pytest.raises(ValueError, match="width is 3, expected 1, 2 or 4"):
        bits([4], 0, 3)
    with pytest.raises(ValueError, match=r"seed is torch.int64 of shape \[2\]"):
        bits([4], [1, 2])
    with pytest.raises(ValueError, match="seed is torch.float32"):
        bits([4], 1.0)


def test_fake_kernel_keeps_symbolic_shapes():
    class Draw(torch.nn.Module):
        def forward(self, x, seed):
            return torch.ops.mlx.random_bits([x.shape[0], 6], seed, 2)

    batch = torch.export.Dim("batch", min=2, max=64)
    arguments = (torch.zeros(3, 2), torch.tensor(1))
    program = torch.export.export(Draw(), arguments, dynamic_shapes=({0: batch}, None))
    assert torch.ops.mlx.random_bits.default in [n.target for n in program.graph.nodes]
    torch.testing.assert_close(
        program.module()(torch.zeros(5, 2), torch.tensor(8)), bits([5, 6], 8, 2)
    )
    with FakeTensorMode():
        assert torch.ops.mlx.random_bits([2, 3], None, 1).dtype == torch.uint8


@pytest.mark.parametrize("kth", [0, 3, 9, 49])
@pytest.mark.parametrize("axis", [-1, 0])
def test_argpartition_keeps_its_contract(kth, axis):
    x = torch.randn(50, 50).round(decimals=1)
    order = torch.ops.mlx.argpartition(x, kth, axis)
    y = x.gather(axis, order).movedim(axis, -1)
    assert order.sort(dim=axis).values.movedim(axis, -1).eq(torch.arange(50)).all()
    pivot = x.sort(dim=axis).values.movedim(axis, -1)[..., kth : kth + 1]
    assert y[..., kth : kth + 1].equal(pivot)
    assert (y[..., :kth] <= pivot).all() and (y[..., kth:] >= pivot).all()
