"""Run ExecuTorch's backend test suite with MLX and other flows, and print a table of the results.

    python test/suite/run.py                       # operators, with MLX and XNNPACK
    python test/suite/run.py --flows mlx -k conv   # some of the operators, with MLX
    python test/suite/run.py --suite models        # torchvision and torchaudio models
    python test/suite/run.py --read build/backend_suite_operators.jsonl

Exits with 1 if a subtest of the MLX flow failed, or if the MLX flow ran no subtest.
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
MLX = "mlx"

# In the order of the table. A subtest that crashes the process counts as failed.
OUTCOMES = ("fully delegated", "partly delegated", "not delegated", "not run", "skipped", "failed")


def outcome(record: dict) -> str:
    """Return the outcome of a subtest, one of `OUTCOMES`.

    The suite skips a subtest whose eager model fails, and one with an undelegated operator for which ExecuTorch has
    no kernel.
    """
    result = record["result"]
    if result == "SKIPPED":
        # Everything is delegated. The suite never runs some programs, such as convolutions over three axes.
        return "not run" if record["undelegated"] == {} else "skipped"
    if result == "SUCCESS_UNDELEGATED":
        return "not delegated"
    if result != "SUCCESS":
        return "failed"
    return "partly delegated" if record["undelegated"] else "fully delegated"


def table(records: list[dict]) -> str:
    """A Markdown table: outcomes by flow."""
    flows = list(dict.fromkeys(r["flow"] for r in records))
    counts = {flow: Counter(outcome(r) for r in records if r["flow"] == flow) for flow in flows}
    lines = ["| subtests | " + " | ".join(flows) + " |", "|---|" + "---:|" * len(flows)]
    for name in OUTCOMES:
        lines.append(f"| {name} | " + " | ".join(str(counts[f][name]) for f in flows) + " |")
    lines.append("| all | " + " | ".join(str(counts[f].total()) for f in flows) + " |")
    return "\n".join(lines)


def shortfalls(records: list[dict], flow: str) -> list[str]:
    """A line for each subtest of a flow that is not fully delegated, with the undelegated operators or the error."""
    lines = []
    for record in records:
        kind = outcome(record)
        if record["flow"] == flow and kind != "fully delegated":
            undelegated = ", ".join(record["undelegated"] or ())
            error = " ".join((record["error"] or "").split())[:160]
            lines.append(f"{record['test']} #{record['subtest']}: {kind}; {undelegated or error}")
    return lines


def run(suite: str, flows: str, processes: int, results: Path, arguments: list[str]) -> None:
    spec = importlib.util.find_spec(f"executorch.backends.test.suite.{suite}")
    folder = next(iter(spec.submodule_search_locations))
    results.parent.mkdir(exist_ok=True)
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "mlx_flow",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "-W",
        "ignore",
        "--flows",
        flows,
        "--results",
        str(results),
    ]
    if processes > 1:
        environment["OMP_NUM_THREADS"] = "1"
        command += ["-n", str(processes), "--dist", "worksteal"]
    # The exit code is not used, because it counts the failures of other flows too.
    subprocess.run([*command, folder, *arguments], env=environment, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=("operators", "models"), default="operators")
    parser.add_argument("--flows", default=f"{MLX},xnnpack", help="comma-separated flows")
    parser.add_argument("-n", type=int, default=2, help="number of processes")
    parser.add_argument("-k", help="pytest expression that selects tests")
    parser.add_argument("--read", type=Path, help="print the table of an earlier run")
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
    for line in shortfalls(records, MLX):
        print(line, file=sys.stderr)
    outcomes = [outcome(r) for r in records if r["flow"] == MLX]
    if not outcomes and MLX in options.flows.split(","):
        print("the suite ran no subtest of the MLX flow", file=sys.stderr)
        return 1
    return int("failed" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
