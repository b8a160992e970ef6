"""The tokens that mlx::sample draws have the distribution that the filters define."""

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
    """A few dozen likely tokens anywhere in the vocabulary, and a tail without weight."""
    g = torch.Generator().manual_seed(vocabulary)
    logits = torch.full((vocabulary,), -25.0)
    places = torch.randperm(vocabulary, generator=g)[:24]
    logits[places] = torch.linspace(2.0, -2.0, 24)
    return logits


# Rows of one batch are independent draws: 10 calls of 400 rows are 4,000 draws.
@pytest.mark.parametrize("vocabulary, rows, calls", [(24, 400, 10), (50, 400, 10), (20011, 80, 20)])
@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_frequencies(draw, kept, vocabulary, rows, calls, given):
    logits = logits_of(vocabulary)
    batch = logits.expand(rows, -1).contiguous()
    drawn = torch.cat([draw(batch, seed=7919 * i, **given) for i in range(calls)])

    temperature = given.get("temperature", 1.0)
    filters = {"temperature": 1.0, "top_p": 1.0} | given
    keep = kept(logits[None], **filters)[0]
    assert keep[drawn].all(), "a token outside the kept set"

    p = torch.where(keep, torch.softmax(logits.double() / temperature, -1), 0)
    expected = rows * calls * p / p.sum()
    counts = torch.bincount(drawn, minlength=vocabulary).double()
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    full = expected > 1e-6
    assert observed[~full].sum() == 0
    assert stats.chisquare(observed[full], expected[full]).pvalue > 1e-4


def test_rows_of_a_batch_are_independent(draw):
    """Two rows with the same logits: pairs of tokens as often as the product says."""
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
