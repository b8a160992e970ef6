"""The frequencies of the tokens that mlx::sample draws follow the distribution that the filters define."""

import pytest
import torch
from scipy import stats

FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.8},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 6, "top_p": 0.9},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 20, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.85, "min_p": 0.04},
]


def logits_of(vocabulary):
    """Return logits of 24 likely tokens at random places in the vocabulary. All others have almost no weight."""
    g = torch.Generator().manual_seed(vocabulary)
    logits = torch.full((vocabulary,), -25.0)
    tokens = torch.randperm(vocabulary, generator=g)[:24]
    logits[tokens] = torch.linspace(2.0, -2.0, 24)
    return logits


# The sequences of a batch are independent draws: 10 calls with a batch of 400 make 4,000 draws.
@pytest.mark.parametrize("vocabulary, batch, calls", [(24, 400, 10), (50, 400, 10), (20011, 80, 20)])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies(draw, kept, vocabulary, batch, calls, filters):
    logits = logits_of(vocabulary)
    logits_batch = logits.expand(batch, -1).contiguous()
    drawn = torch.cat([draw(logits_batch, seed=7919 * i, **filters) for i in range(calls)])

    parameters = {"temperature": 1.0, "top_p": 1.0} | filters
    keep = kept(logits[None], **parameters)[0]
    assert keep[drawn].all(), "a filtered token was drawn"

    p = torch.where(keep, torch.softmax(logits.double() / parameters["temperature"], -1), 0)
    expected = batch * calls * p / p.sum()
    counts = torch.bincount(drawn, minlength=vocabulary).double()
    # The chi-squared test needs about 5 expected draws per bin. All rarer tokens share one bin.
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    possible = expected > 1e-6
    assert observed[~possible].sum() == 0
    assert possible.sum() > 1
    assert stats.chisquare(observed[possible], expected[possible]).pvalue > 1e-4


def test_sequences_of_a_batch_are_independent(draw):
    """The frequencies of pairs of tokens are products of the frequencies of tokens."""
    logits = torch.tensor([[0.0, 0.5, 1.0]]).expand(2, -1).contiguous()
    pairs = torch.stack([draw(logits, seed=i) for i in range(2000)])
    table = torch.zeros(3, 3)
    for a, b in pairs.tolist():
        table[a, b] += 1
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-4


def test_consecutive_seeds_are_independent(draw):
    logits = torch.tensor([[0.0, 0.5, 1.0]])
    tokens = [int(draw(logits, seed=i)) for i in range(3000)]
    table = torch.zeros(3, 3)
    for a, b in zip(tokens, tokens[1:], strict=False):
        table[a, b] += 1
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-4
