"""Random numbers that are a function of a seed.

`rand`, `randn` and the other functions compute from `mlx::random_bits`, in eager torch and in a program.
`seed_random_ops` gives an exported program, which calls torch's own random operators, a seed as an input.
"""

from .functions import bernoulli, dropout, multinomial, rand, randint, randn, randperm
from .seeding import seed_random_ops

__all__ = ["bernoulli", "dropout", "multinomial", "rand", "randint", "randn", "randperm", "seed_random_ops"]
