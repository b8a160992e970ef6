"""The fixture `draw` runs mlx::sample in eager torch, or in a program of one of the kinds in sampling_programs.py.

The fixture `reference` is the specification of the operator.
"""

import functools

import pytest
import torch
from sampling_programs import DTYPES, Sample, load

NOISE_KEY = 0x278DDE6D  # the constant of custom_kernel_ops/sampling/noise.py
LARGEST_FLOAT = torch.finfo(torch.float32).max


def _draw(how, logits, temperature=1.0, top_p=1.0, **parameters):
    parameters = {"temperature": temperature, "top_p": top_p} | parameters
    parameters = {n: torch.tensor(v, dtype=DTYPES[n]) for n, v in parameters.items() if v is not None}
    if how == "eager":
        return Sample(tuple(parameters))(logits, *parameters.values())
    run = load(tuple(logits.shape), logits.dtype, tuple(parameters), how)
    return run([logits, *parameters.values()])


@pytest.fixture(params=["eager", "portable", "replaced", "node"])
def draw(request):
    return functools.partial(_draw, request.param)


@pytest.fixture
def draws():
    """The functions of the fixture `draw`, by name."""
    return {how: functools.partial(_draw, how) for how in ("eager", "portable", "replaced", "node")}


def random_bits(batch, count, seed):
    return torch.ops.mlx.random_bits([batch, count], torch.tensor(seed))


def kept(logits, temperature, top_p, top_k=None, min_p=None):
    """Return which tokens all filters keep, bool `[B, V]`, computed in float64."""
    x = torch.nan_to_num(logits.float(), -torch.inf, LARGEST_FLOAT, -torch.inf).double()
    p = torch.softmax((x - x.amax(-1, keepdim=True).clamp(min=-LARGEST_FLOAT)) / temperature, -1)
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices
    mass = p.gather(-1, order).cumsum(-1)
    keep = torch.ones_like(x, dtype=torch.bool)
    for i in range(len(x)):
        last_ranks = []
        if top_p < 1:
            last_ranks.append(int((mass[i] < top_p).sum()))
        if top_k is not None and 0 < top_k < x.shape[1]:
            last_ranks.append(top_k - 1)
        for rank in last_ranks:
            keep[i] &= x[i] >= x[i, order[i, min(rank, x.shape[1] - 1)]]
        if min_p is not None and min_p > 0:
            keep[i] &= p[i] >= min(min_p, 1) * p[i].max() * (1 - 1e-9)
    return keep


@pytest.fixture(name="kept")
def _kept():
    return kept


@pytest.fixture
def reference():
    """A function that computes tokens by the definition of `mlx::sample`.

    The token is the argmax of the logits with noise, over the tokens that the filters keep.
    """

    def specification(logits, temperature=1.0, top_p=1.0, seed=0, top_k=None, min_p=None):
        x = torch.nan_to_num(logits.float(), -torch.inf, LARGEST_FLOAT, -torch.inf)
        if not temperature > 0:
            return x.argmax(-1)
        keep = kept(logits, temperature, top_p, top_k, min_p)
        batch, vocabulary = x.shape
        off = not top_p < 1 and not (top_k and 0 < top_k < vocabulary) and not (min_p or 0) > 0
        if off:  # token v uses word [b, v]
            words = random_bits(batch, vocabulary, seed).float()
        else:  # the i-th most likely token uses word [b, i]. The words come in three parts, each with its own seed.
            near = random_bits(batch, 256, seed)
            middle = random_bits(batch, 2048 - 256, seed ^ NOISE_KEY)
            far = random_bits(batch, max(vocabulary - 2048, 1), seed ^ (2 * NOISE_KEY))
            words = torch.cat([w.float() for w in (near, middle, far)], -1)
            rank = torch.sort(x, dim=-1, descending=True, stable=True).indices.argsort(-1)
            words = words.gather(1, rank)
        uniform = (words / 0xFFFFFFFF).clamp(max=1 - 2**-24)
        gumbel = -torch.log(-torch.log(uniform))
        drop = x.amax(-1, keepdim=True).clamp(min=-LARGEST_FLOAT) - x
        score = gumbel - drop / torch.tensor(temperature, dtype=torch.float32)
        return torch.where(keep, score, -torch.inf).argmax(-1)

    return specification
