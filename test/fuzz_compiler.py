"""Compares the compiler with eager torch on generated programs.

    python test/fuzz_compiler.py --programs 10000 [--seed 0] [--direct | --portable | --gradients] [--family NAME]

The family `graphs` has random graphs of supported operators. Each of the other families varies the subgraph of one
fusion. Without `--family`, all families run in turn. `--direct` leaves out torch.export and ExecuTorch's passes, and is
about five times as fast. So does `--portable`, which runs portable programs as ExecuTorch's own MLX delegate does, in
the interpreter of test/interpreter. `--gradients` compares the gradients of random graphs, each exported by itself. The
script prints each kind of failure once, with the source of a program that fails in this way. It exits with code 1 if a
program failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter

import torch._dynamo.config
from fuzz.check import Counts, check
from fuzz.direct import DirectRoute, PortableRoute
from fuzz.exported import ExportedRoute
from fuzz.gradients import GradientRoute, gradient_programs
from fuzz.layers import LAYERS
from fuzz.near_misses import FAMILIES as NEAR_MISSES
from fuzz.random_graphs import programs
from fuzz.route import Route
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

BATCH = 25  # programs per export
GRADIENTS = "gradients"
FAMILIES = NEAR_MISSES | LAYERS
STRATEGIES = {"graphs": programs(), **FAMILIES, GRADIENTS: gradient_programs()}


def run(family: str, count: int, first_seed: int, route: type[Route]) -> tuple[Counts, Counter]:
    """Check `count` programs. Returns the counts, and how often each kind of failure occurred."""
    counts, failures = Counts(), Counter()

    def report(failure: Exception) -> None:
        kind = f"{type(failure).__name__}: {str(failure).splitlines()[0][:70]}"
        if failures[kind] == 0:
            print(f"{family}: {type(failure).__name__}: {failure}\n", flush=True)
        failures[kind] += 1

    @seed(first_seed)
    @settings(
        max_examples=-(-count // BATCH),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(STRATEGIES[family], min_size=BATCH, max_size=BATCH))
    def generated(batch) -> None:
        check(batch, counts, report, route)

    generated()
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=1000, metavar="N", help="programs of each family")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--family", choices=["graphs", *FAMILIES], help="default: all")
    parser.add_argument("--direct", action="store_true", help="without torch.export and ExecuTorch's passes")
    parser.add_argument("--portable", action="store_true", help="portable programs, on ExecuTorch's own delegate")
    parser.add_argument("--gradients", action="store_true", help="gradients of random graphs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    route = PortableRoute if options.portable else DirectRoute if options.direct else ExportedRoute
    families = [options.family] if options.family else ["graphs", *FAMILIES]
    if options.gradients:
        route, families = GradientRoute, [GRADIENTS]
    if route in (DirectRoute, PortableRoute):
        torch._dynamo.config.fake_tensor_cache_enabled = False  # the graphs differ, so that the cache only costs time
    failed = 0
    for family in families:
        begin = time.perf_counter()
        counts, failures = run(family, options.programs, options.seed, route)
        failed += failures.total()
        print(f"{family}: {counts}, {failures.total()} failed; {time.perf_counter() - begin:.0f} s", flush=True)
        for reason, times in counts.not_delegated.most_common(10):
            print(f"    not delegated, {times} times: {reason}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
