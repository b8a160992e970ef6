"""mlx::random_bits in eager torch against libmlx, bit for bit."""

import subprocess
from pathlib import Path

import executorch_mlx.custom_ops  # noqa: F401
import mlx.core as mx
import numpy as np
import pytest
import torch
from compile_cpp import compile_cpp
from torch._subclasses.fake_tensor import FakeTensorMode

SEEDS = [0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, -1, -(2**63), -7]
COUNTS = [1, 2, 3, 4, 5, 7, 8, 31, 64, 255, 1001]
DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def bits(shape, seed=None, width=4):
    seed = None if seed is None else torch.tensor(seed)
    return torch.ops.mlx.random_bits(shape, seed, width)


@pytest.fixture(scope="module")
def libmlx_bits(tmp_path_factory):
    """A function that takes a list of (seed, width, count) and returns the bytes that libmlx draws for them, in order.

    A small C++ program calls libmlx. The width is in bytes.
    """
    home = Path(next(iter(mx.__path__ if hasattr(mx, "__path__") else [mx.__file__])))
    home = next(p for p in [home, *home.parents] if (p / "include" / "mlx").is_dir())
    program = compile_cpp(
        tmp_path_factory.mktemp("oracle") / "random_bits",
        f"-I{home / 'include'}",
        Path(__file__).with_name("random_bits_oracle.cpp"),
        f"-L{home / 'lib'}",
        "-lmlx",
        f"-Wl,-rpath,{home / 'lib'}",
    )

    def draw(requests):
        lines = "".join(f"{seed} {width} {count}\n" for seed, width, count in requests)
        out = subprocess.run([program], input=lines.encode(), capture_output=True, check=True)
        return out.stdout

    return draw


@pytest.mark.parametrize("width", DTYPES)
def test_bits_equal_libmlx(libmlx_bits, width):
    requests = [(seed, width, count) for seed in SEEDS for count in COUNTS]
    drawn = libmlx_bits(requests)
    for seed, _, count in requests:
        ours = bits([count], seed, width)
        assert ours.dtype == DTYPES[width]
        expected, drawn = drawn[: count * width], drawn[count * width :]
        assert ours.numpy().tobytes() == expected, (seed, width, count)
    assert not drawn


@pytest.mark.parametrize("seed", [s for s in SEEDS if s >= 0])
def test_words_and_uniforms_equal_mlx_python(seed):
    key = mx.random.key(seed)
    words = np.array(mx.random.split(key, 500)).reshape(-1)
    np.testing.assert_array_equal(bits([1000], seed).numpy(), words)
    uniform = bits([33, 7], seed).float().mul(2.0**-32).clamp(max=1 - 2.0**-24)
    np.testing.assert_array_equal(uniform.numpy(), mx.random.uniform(shape=(33, 7), key=key))


def test_shape_does_not_change_the_bits():
    torch.testing.assert_close(bits([4, 3, 5], 3), bits([60], 3).reshape(4, 3, 5))
    assert bits([], 3).shape == () and bits([0, 4], 3).shape == (0, 4)


def test_seed_of_shape_1_equals_scalar_seed():
    torch.testing.assert_close(torch.ops.mlx.random_bits([9], torch.tensor([5])), bits([9], 5))


def test_unseeded_draws_differ():
    assert len({bits([4]).numpy().tobytes() for _ in range(50)}) == 50


def test_invalid_widths_and_seeds_raise():
    with pytest.raises(ValueError, match="width: got 3, expected 1, 2 or 4"):
        bits([4], 0, 3)
    with pytest.raises(ValueError, match=r"seed: got torch.int64 of shape \[2\]"):
        bits([4], [1, 2])
    with pytest.raises(ValueError, match="seed: got torch.float32"):
        bits([4], 1.0)


def test_fake_kernel_keeps_symbolic_shapes():
    class Draw(torch.nn.Module):
        def forward(self, x, seed):
            return torch.ops.mlx.random_bits([x.shape[0], 6], seed, 2)

    batch = torch.export.Dim("batch", min=2, max=64)
    arguments = (torch.zeros(3, 2), torch.tensor(1))
    program = torch.export.export(Draw(), arguments, dynamic_shapes=({0: batch}, None))
    assert torch.ops.mlx.random_bits.default in [n.target for n in program.graph.nodes]
    torch.testing.assert_close(program.module()(torch.zeros(5, 2), torch.tensor(8)), bits([5, 6], 8, 2))
    with FakeTensorMode():
        assert torch.ops.mlx.random_bits([2, 3], None, 1).dtype == torch.uint8
