"""The noise of a draw: random words from a seed, and the Gumbel noise that they become."""

from __future__ import annotations

import torch

from .logits import LARGEST_FLOAT

BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1
# The ranks at which the second and the third part of the noise begin. Each part has a seed of its own. No tier has more
# than 2048 candidates, so only the version for all tokens computes the third part.
NOISE_PARTS = (256, 2048)
# Part i has the seed `seed ^ (i * NOISE_KEY)`. ExecuTorch's own MLX delegate reads the low 32 bits of a seed, with
# their sign. The multiples are therefore below 2**31: a seed that fits in an int32 then gives seeds that fit, and the
# upper bits of a larger seed still count. The key comes from the golden ratio. Two seeds whose parts share a key lie at
# least 390 million apart, so that the consecutive seeds of an answer never meet.
NOISE_KEY = 0x278DDE6D


def random_seed():
    """Return a seed from MLX's own sequence of keys, at most 2**63 - 1."""
    high, low = torch.ops.mlx.random_bits([2]).to(torch.int64).unbind()
    return torch.bitwise_and(high, 0x7FFFFFFF) * (1 << 32) + low


def words_by_rank(batch, count, seed):
    """Return the random words of the `count` most likely tokens, `[B, count]` in float32.

    The words come in parts, each of which has a seed of its own. A version with few candidates computes only the first
    parts, which have the same words in every version.
    """
    parts, start = [], 0
    for part, end in enumerate((*NOISE_PARTS, max(count, NOISE_PARTS[-1] + 1))):
        if start < count:
            key = torch.bitwise_xor(seed, part * NOISE_KEY) if part else seed
            words = torch.ops.mlx.random_bits([batch, end - start], key).to(torch.float32)
            parts.append(words[:, : count - start])
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def minus_gumbel(words):
    """Return -gumbel = log(-log(uniform)) for random 32-bit words, which are given as float32.

    MLX computes the same uniform numbers from random words. The result is finite even for the word 0.
    """
    uniform = torch.clamp(words * 2.0**-32, max=BELOW_ONE)
    return torch.clamp(torch.log(-torch.log(uniform)), max=LARGEST_FLOAT)
