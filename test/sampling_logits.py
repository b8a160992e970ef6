"""Random logits for tests of the sampler."""

import torch


def logits_of(kind, batch, vocabulary, seed=0):
    """Return logits `[batch, vocabulary]`, float32. `kind` is "text", "flat", "ties" or "constant"."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, vocabulary, generator=g)
    if kind == "flat":
        return noise
    if kind == "constant":
        return torch.zeros(batch, vocabulary)
    if kind == "ties":
        return (noise * 2).round()
    # Probabilities follow a power law of the rank, as in natural language.
    rank = torch.rand(batch, vocabulary, generator=g).argsort(-1)
    return -1.5 * torch.log(1.0 + rank) + noise * 0.1
