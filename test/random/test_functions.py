"""The random functions with a seed, compared with MLX, with the delegate, and with their distributions."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime
from executorch_mlx.random import bernoulli, dropout, multinomial, rand, randint, randn, randperm
from executorch_mlx.random.distributions import race

HALVES = (torch.float16, torch.bfloat16)
DTYPES = {torch.float32: mx.float32, torch.float16: mx.float16, torch.bfloat16: mx.bfloat16}
WEIGHTS = torch.tensor([1.0, 0.0, 3.0, 4.0])


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rand_equals_mlx(dtype, seed):
    expected = mx.random.uniform(shape=(33, 700), dtype=DTYPES[dtype], key=mx.random.key(seed)).astype(mx.float32)
    np.testing.assert_array_equal(rand([33, 700], seed=seed, dtype=dtype).float().numpy(), expected)


class Draws(torch.nn.Module):
    """Calls every random function with `seed`, and `rand` also with the constant seed 11. `x` is [N, 4].

    Returns the results that the delegate must match exactly, and those that it must match within rounding.
    """

    def forward(self, x, seed):
        n = x.shape[0]
        exact = [rand([n, 3], seed=seed, dtype=dtype) for dtype in DTYPES]
        exact += [randint(-3, 2**31 - 3, [n], seed=seed), randint(0, 9, [n], seed=seed, dtype=torch.int32)]
        exact += [randperm(n, seed=seed), bernoulli(x, seed=seed), dropout(x, 0.3, seed=seed), rand([5], seed=11)]
        exact += [dropout(x.to(dtype), 0.3, seed=seed) for dtype in HALVES]
        exact += [multinomial(x.to(dtype), 3, seed=seed) for dtype in DTYPES]
        exact += [multinomial(x, 1, seed=seed), multinomial(x, 9, replacement=True, seed=seed)]
        return exact, [randn([n, 3], seed=seed, dtype=dtype) for dtype in DTYPES]


def lower_and_load(program: torch.export.ExportedProgram):
    """Lower a program, check that all of it is delegated, and load it. The result must outlive its methods."""
    partitioner = MLXPartitioner()
    config = EdgeCompileConfig(_check_ir_validity=False)
    manager = to_edge_transform_and_lower(program, partitioner=[partitioner], compile_config=config)
    assert partitioner.explain().refused == ()
    return Runtime.get().load_program(manager.to_executorch().buffer)


def test_the_delegate_draws_what_eager_torch_draws():
    x = torch.rand(300, 4)
    rows = torch.export.Dim("rows", min=2, max=1000)
    program = lower_and_load(torch.export.export(Draws(), (x, torch.tensor(0)), dynamic_shapes=({0: rows}, None)))
    method = program.load_method("forward")
    for count, seed in ((300, 5), (300, -1), (41, 2**40), (1000, 3)):
        inputs = (torch.rand(count, 4), torch.tensor(seed))
        exact, normal = Draws()(*inputs)
        results = method.execute(list(inputs))
        for got, expected in zip(results, exact):
            assert torch.equal(got, expected) and got.dtype == expected.dtype
        for got, expected in zip(results[len(exact) :], normal, strict=True):
            torch.testing.assert_close(got, expected)


def test_the_same_seed_draws_the_same_numbers():
    assert torch.equal(randn([9], seed=3), randn([9], seed=torch.tensor([3])))
    assert torch.equal(rand([9], seed=-1), rand([9], seed=2**64 - 1))
    assert torch.equal(rand([9], seed=np.int64(3)), rand([9], seed=3))
    draws = [randn([9], seed=seed) for seed in (0, 1, 2**32, None, None)]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


def close(values, mean, deviation):
    """Whether the mean of the draws is within 4 standard errors."""
    return abs(values.double().mean() - mean) < 4 * deviation / values.numel() ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments(dtype):
    size = [500, 400]
    uniform, normal = rand(size, seed=1, dtype=dtype).double(), randn(size, seed=2, dtype=dtype).double()
    assert uniform.min() >= 0 and uniform.max() < 1
    assert close(uniform, 1 / 2, 12**-0.5) and close(uniform**2, 1 / 3, 0.3)
    assert close(normal, 0, 1) and close(normal**2, 1, 2**0.5) and close(normal**4, 3, 96**0.5)
    kept = dropout(torch.ones(size, dtype=dtype), 0.25, seed=3) > 0
    assert close(kept, 0.75, 0.44) and close(bernoulli(torch.full(size, 0.3), seed=4), 0.3, 0.46)
    integers = randint(-2, 8, size, seed=5)
    assert close(integers, 2.5, 8.25**0.5) and integers.unique().tolist() == list(range(-2, 8))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e37])
def test_multinomial_draws_with_the_probabilities(scale):
    weights = WEIGHTS * scale
    many = multinomial(weights, 40000, replacement=True, seed=1)
    ordered = multinomial(weights.expand(40000, 4), 3, seed=2)
    for drawn in (many, ordered[:, 0], multinomial(weights.expand(40000, 4), 1, seed=3)):
        for index, probability in enumerate(WEIGHTS / 8):
            assert close((drawn == index).double(), probability, (probability * (1 - probability)) ** 0.5 + 1e-9)
    after_0 = ordered[ordered[:, 0] == 0, 1]  # indices 1, 2 and 3 are left, with the weights 0, 3 and 4
    assert close((after_0 == 2).double(), 3 / 7, 0.5)


def test_multinomial_without_replacement_repeats_no_index():
    drawn = multinomial(torch.rand(2000, 50), 50, seed=1)
    assert torch.equal(drawn.sort().values, torch.arange(50).expand(2000, 50))
    assert multinomial(WEIGHTS, 4, seed=1)[3] == 1  # the index of weight 0 is the last


def test_the_winners_of_a_race_are_not_tied():
    """`race` turns each random word into a time. Small words give distinct times, so no tie decides who wins.

    With equal weights, the smallest words win. At equal times, the lower index would win.
    """
    words = torch.tensor([1000, 5, 3, 999, 4, 2**32 - 1]).to(torch.uint32)
    assert race(words, torch.ones(6), 6).tolist() == [2, 4, 1, 3, 0, 5]


def test_randperm_is_uniform():
    first = torch.stack([randperm(4, seed=seed) for seed in range(4000)])
    assert torch.equal(first.sort().values, torch.arange(4).expand(4000, 4))
    assert all(close((first[:, i] == j).double(), 1 / 4, 0.44) for i in range(4) for j in range(4))


def test_the_largest_integers_of_a_dtype_are_drawn():
    for dtype in (torch.uint8, torch.int8):
        limits = torch.iinfo(dtype)
        drawn = randint(limits.min, limits.max + 1, [9000], seed=1, dtype=dtype)
        assert drawn.unique().tolist() == list(range(limits.min, limits.max + 1))
    assert randint(0, 2, [50], seed=1, dtype=torch.bool).unique().tolist() == [False, True]
    assert randperm(128, seed=1, dtype=torch.int8).sort().values.tolist() == list(range(128))
    assert randint(2**63 - 2, 2**63, [50], seed=1).unique().tolist() == [2**63 - 2, 2**63 - 1]


@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: rand([2], dtype=torch.float64), "rand: dtype: got torch.float64, expected float32, float16"),
        (lambda: rand([2], seed=2**64), "seed: got 18446744073709551616, expected an int of 64 bits"),
        (lambda: rand([2], seed=torch.tensor([1, 2])), r"seed: got torch.int64 of shape \[2\]"),
        (lambda: rand([3, -1]), r"mlx::random_bits: shape: got \[3, -1\], expected sizes of at least 0"),
        (lambda: randn([2], dtype=torch.int64), "randn: dtype: got torch.int64, expected float32, float16 or bfloat16"),
        (lambda: randn([2], dtype=torch.complex64), "randn: dtype: got torch.complex64"),
        (lambda: randint(0, 2.5, [2]), "randint: high: got 2.5, expected an int"),
        (lambda: randint(0, 300, [2], dtype=torch.uint8), "randint: dtype: got torch.uint8, expected .* 0 to 299"),
        (lambda: randint(-1, 3, [2], dtype=torch.uint8), "randint: dtype: got torch.uint8, expected .* -1 to 2"),
        (lambda: randint(2**63, 2**63 + 1, [2]), "randint: dtype: got torch.int64"),
        (lambda: randperm(129, dtype=torch.int8), "randperm: dtype: got torch.int8, expected .* 0 to 128"),
        (lambda: randperm(2050, dtype=torch.float16), "randperm: dtype: got torch.float16, expected .* 0 to 2049"),
        (lambda: randperm(-1), "randperm: n: got -1, expected at least 0"),
        (lambda: dropout(WEIGHTS, -0.5), "dropout: p: got -0.5, expected 0 to 1"),
        (lambda: dropout(WEIGHTS, float("nan")), "dropout: p: got nan"),
        (lambda: multinomial(torch.tensor(1.0), 1), r"multinomial: weights: got shape \[\], expected \[V\]"),
        (lambda: multinomial(torch.zeros(2, 0), 1, True), r"multinomial: weights: got shape \[2, 0\]"),
        (lambda: randint(0, 2**32, [2]), r"randint: got the range \[0, 4294967296\), expected 1 to 2\^31 numbers"),
        (lambda: multinomial(WEIGHTS, 5), "multinomial: num_samples: got 5, expected 1 to 4"),
        (lambda: multinomial(WEIGHTS, 0, True), "multinomial: num_samples: got 0, expected 1 or more"),
    ],
)
def test_wrong_arguments_raise(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
