"""Torch operators that another library has defined under our names. Each test runs a process of its own."""

import subprocess
import sys

ROPE = """
import torch

@torch.library.custom_op("mlx::rope", mutates_args=())
def rope(x: torch.Tensor, dims: int, pos: int, traditional: bool = False, base: float = 500000.0,
         scale: float = 1.0, freqs: torch.Tensor | None = None) -> torch.Tensor:
    return x + 1

from executorch_mlx.custom_ops import official
print(official.rope(torch.zeros(1, 1, 1, 2), 2, 0).sum().item())
"""

SAMPLE = """
import torch

@torch.library.custom_op("mlx::sample", mutates_args=())
def sample(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)

import executorch_mlx.custom_kernel_ops
"""


def run(source):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True)


def test_existing_operator_with_equal_schema_is_used():
    done = run(ROPE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2.0\n"


def test_existing_operator_with_different_schema_is_an_error():
    done = run(SAMPLE)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: executorch_mlx: torch operator mlx::sample already exists")
    assert "Another MLX delegate is loaded" in last
