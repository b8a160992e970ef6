"""Rounding noise, which the tolerances of comparisons with eager torch come from."""

import torch
from executorch_mlx.custom_kernel_ops.int8_activations import int8_quantized_matmul
from executorch_mlx.verification.noise import RoundingNoise


def noisy(function, *arguments):
    """Return the results of a few noisy runs, as a set."""
    results = set()
    for seed in range(8):
        with RoundingNoise(seed):
            results.add(float(function(*arguments)))
    return results


def test_computed_values_get_noise():
    x = torch.tensor([-2.75], dtype=torch.bfloat16)
    assert len(noisy(torch.exp, x)) == 2
    # The schema of this operator has an argument that it writes in training only.
    assert len(noisy(torch.nn.functional.rrelu, x)) > 1


def test_selected_values_get_none():
    x = torch.tensor([-2.75, 1.0])
    assert noisy(torch.amax, x) == {1.0}
    assert noisy(lambda x: x[0].neg_(), x.clone()) <= {2.75, -2.75}


def test_values_that_are_rounded_to_8_bits_change_by_a_step():
    """Without this noise, the export of a small model with int8 activations failed if the program rounded otherwise."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(1, 2)
    sums = noisy(lambda x: int8_quantized_matmul(x, torch.zeros(1, 8).int(), ones, ones, 32, 4).sum(), x)
    assert max(sums) - min(sums) > 0.01
