"""Portable programs draw the tokens of eager torch on ExecuTorch's own MLX delegate. official_draws.py tries more."""

from official_draws import draws


def test_draws_equal_eager_torch():
    results = list(draws(seeds=6))
    assert len({token for _, _, token, _ in results}) > 20
    assert [result for result in results if result[2] != result[3]] == []
