"""mlx::token_logprobs and mlx::top_logprobs against torch's log_softmax and sort."""

import functools

import pytest
import torch
from executorch_mlx.custom_kernel_ops.logprobs import token_logprobs, top_logprobs
from loaded_method import LoadedMethod
from sampling_programs import lower

TOP_COUNT = 5


class Both(torch.nn.Module):
    def forward(self, logits, tokens, enabled):
        return token_logprobs(logits, tokens, enabled), *top_logprobs(logits, enabled, TOP_COUNT)


@functools.cache
def _program(shape, dtype, enabled_shape):
    tokens, enabled = torch.zeros(shape[0], dtype=torch.int64), torch.zeros(enabled_shape, dtype=torch.int64)
    inputs = torch.zeros(shape, dtype=dtype), tokens, enabled
    method = LoadedMethod(lower(Both(), inputs).buffer)
    return lambda inputs: [t.clone() for t in method.execute(inputs)]


@pytest.fixture(params=["eager", "runtime"])
def run(request):
    def run(logits, tokens, enabled):
        tokens, enabled = torch.tensor(tokens), torch.tensor(enabled)
        if request.param == "eager":
            return Both()(logits, tokens, enabled)
        return _program(tuple(logits.shape), logits.dtype, tuple(enabled.shape))([logits, tokens, enabled])

    return run


@pytest.mark.parametrize("vocabulary", [5, 64, 70, 1000, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_equal_log_softmax_and_sort(run, vocabulary, dtype):
    logits = (torch.randn(3, vocabulary) * 4).to(dtype)
    tokens = torch.randint(vocabulary, (3,))
    expected = logits.double().log_softmax(-1).float()
    chosen, top, values = run(logits, tokens.tolist(), 1)
    torch.testing.assert_close(chosen, expected.gather(1, tokens[:, None])[:, 0], atol=2e-6, rtol=1e-6)
    # Equal logits are in ascending order of the token.
    order = torch.sort(-logits.float(), dim=-1, stable=True).indices[:, :TOP_COUNT]
    assert top.equal(order)
    torch.testing.assert_close(values, expected.gather(1, order), atol=2e-6, rtol=1e-6)


def test_ties_give_the_lowest_tokens(run):
    logits = torch.zeros(3, 1000)
    logits[1] = (torch.arange(1000) % 3).float()
    logits[2, 900:] = 1
    logits[2, 999] = 2
    _, top, _ = run(logits, [0, 0, 0], 1)
    assert top.tolist() == [[0, 1, 2, 3, 4], [2, 5, 8, 11, 14], [999, 900, 901, 902, 903]]


def test_results_of_rows_that_are_off_are_zero(run):
    logits = torch.randn(3, 70)
    on, off = run(logits, [1, 2, 3], [1, 1, 1]), run(logits, [1, 2, 3], 0)
    assert all(x.eq(0).all() for x in off)
    for x, one, zero in zip(run(logits, [1, 2, 3], [0, 1, 0]), on, off):
        assert x[1].equal(one[1]) and x[::2].equal(zero[::2])


def test_a_row_does_not_depend_on_the_others(run):
    logits = torch.randn(3, 1000) * 3
    together = run(logits, [4, 5, 6], 1)
    for i in range(3):
        assert all(x[i].equal(y[0]) for x, y in zip(together, run(logits[i : i + 1].clone(), [4 + i], 1)))


def test_excluded_tokens(run):
    """-inf and NaN logits, and tokens outside of the vocabulary, have probability 0."""
    logits = torch.tensor([[0.0, -torch.inf, torch.nan, 1.0, 2.0, 0.5], [-torch.inf] * 6, [torch.inf] + [0.0] * 5])
    chosen, top, values = run(logits, [1, 7, 0], 1)
    assert chosen.tolist() == [-torch.inf, -torch.inf, 0]
    assert top[0].tolist() == [4, 3, 5, 0, 1] and values[0, 4] == -torch.inf
    torch.testing.assert_close(values[0, :4], torch.tensor([2.0, 1.0, 0.5, 0.0]).log_softmax(0))
    assert top[1].tolist() == [0, 1, 2, 3, 4] and not values.isnan().any()


@pytest.mark.parametrize(
    "inputs, message",
    [
        ((torch.zeros(4), [0], 1), r"logits: got torch.float32 of shape \[4\]"),
        ((torch.zeros(2, 9), [0], 1), r"tokens: got torch.int64 of shape \[1\]"),
        ((torch.zeros(2, 9), [0, 0], [1, 1, 1]), r"enabled: got torch.int64 of shape \[3\]"),
        ((torch.zeros(2, 9), [0, 0], 1.0), "enabled: got torch.float32"),
        ((torch.zeros(2, 3), [0, 0], 1), "top_logprobs: count: got 5, expected 1 to 3"),
    ],
)
def test_invalid_arguments_raise(inputs, message):
    logits, tokens, enabled = inputs
    with pytest.raises(ValueError, match=message):
        Both()(logits, torch.tensor(tokens), torch.tensor(enabled))
