"""Rounding noise, which the tolerances of comparisons with eager torch come from."""

import torch
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
