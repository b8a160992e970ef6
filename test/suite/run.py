"""Run ExecuTorch's backend test suite with our flow and others; print what became of it.

    python test/suite/run.py                       operators, ours and XNNPACK's
    python test/suite/run.py --flows mlx -k conv   a part of it
    python test/suite/run.py --suite models        its torchvision and torchaudio models
    python test/suite/run.py --read build/backend_suite_operators.jsonl

Exits with 1 if a subtest of our flow failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build"
OURS = "mlx"

# In the order of the table. A crash of the process, which no subtest survives, is a failure too.
OUTCOMES = ("fully delegated", "partly delegated", "not delegated", "not run", "skipped", "failed")


def outcome(record: dict) -> str:
    """What a subtest's record says.

    Skipped are those whose eager model fails, and those that leave on the host an operator
    for which ExecuTorch has no kernel.
    """
    result = record["result"]
    if result == "SKIPPED":
        # The suite runs no convolution over three axes, delegated or not.
        return "not run" if record["left"] == {} else "skipped"
    if result == "SUCCESS_UNDELEGATED":
        return "not delegated"
    if result != "SUCCESS":
        return "failed"
    return "partly delegated" if record["left"] else "fully delegated"


def table(records: list[dict]) -> str:
    flows = list(dict.fromkeys(r["flow"] for r in records))
    counts = {flow: Counter(outcome(r) for r in records if r["flow"] == flow) for flow in flows}
    lines = ["| subtests | " + " | ".join(flows) + " |", "|---|" + "---:|" * len(flows)]
    for name in OUTCOMES:
        lines.append(f"| {name} | " + " | ".join(str(counts[f][name]) for f in flows) + " |")
    lines.append("| all | " + " | ".join(str(counts[f].total()) for f in flows) + " |")
    return "\n".join(lines)


def rest(records: list[dict], flow: str) -> list[str]:
    """What of a flow is not fully delegated, and what it left."""
    lines = []
    for record in records:
        kind = outcome(record)
        if record["flow"] == flow and kind != "fully delegated":
            left = ", ".join(record["left"] or ())
            error = " ".join((record["error"] or "").split())[:160]
            lines.append(f"{record['test']} #{record['subtest']}: {kind}; {left or error}")
    return lines


def run(suite: str, flows: str, processes: int, results: Path, arguments: list[str]) -> None:
    spec = importlib.util.find_spec(f"executorch.backends.test.suite.{suite}")
    folder = next(iter(spec.submodule_search_locations))
    results.parent.mkdir(exist_ok=True)
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mlx_flow", "-p", "no:cacheprovider", "--tb=no",
               "-W", "ignore", "--flows", flows, "--results", str(results)]
    if processes > 1:
        environment["OMP_NUM_THREADS"] = "1"
        command += ["-n", str(processes), "--dist", "worksteal"]
    # pytest's own verdict counts XNNPACK's failures too.
    subprocess.run([*command, folder, *arguments], env=environment, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=("operators", "models"), default="operators")
    parser.add_argument("--flows", default=f"{OURS},xnnpack")
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("-k", help="pytest's expression of tests to run")
    parser.add_argument("--read", type=Path, help="print the table of results that are there")
    options = parser.parse_args()
    results = options.read or BUILD / f"backend_suite_{options.suite}.jsonl"
    if options.read is None:
        selection = ["-k", options.k] if options.k else []
        run(options.suite, options.flows, options.n, results, selection)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    if not records:
        print("the suite ran no subtest", file=sys.stderr)
        return 1
    print(table(records))
    for line in rest(records, OURS):
        print(line, file=sys.stderr)
    return int(any(r["flow"] == OURS and outcome(r) == "failed" for r in records))


if __name__ == "__main__":
    sys.exit(main())
