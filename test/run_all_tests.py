"""Run the op rows in the C++ runtime: export, run `op_test_runner`, compare with eager torch.

    python test/run_all_tests.py [NAME] [--list] [--rebuild] [-j N] [--clean-after] [-v]

NAME is an op row (`exp`, `sum.dim_IntList/dtype`), an operator (all its op rows) or a family (`elementwise`).
Exits with 0 if all op rows pass, 1 if any fails, 2 if the command line is invalid.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import multiprocessing
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def families() -> list[str]:
    return sorted(p.stem.removeprefix("test_") for p in (ROOT / "test" / "ops").glob("test_*.py"))


def op_rows(family: str) -> list:
    """The op rows of a family. The import works because test/, the folder of this script, is in `sys.path`."""
    return getattr(importlib.import_module(f"ops.test_{family}"), "ROWS", [])


def selected(name: str | None) -> Iterator[tuple[str, int, str]]:
    """Yield (family, index in the family, name) for each op row that `name` selects; all op rows if it is None."""
    for family in families():
        for i, row in enumerate(op_rows(family)):
            if name in (None, family, row.name, row.name.split("/")[0], row.target) or (
                row.name.split("/")[0].partition(".")[0] == name
            ):
                yield family, i, row.name


def run_one(job: tuple[str, int, str]) -> tuple[str, float, str | None]:
    """Return the name of the op row, the seconds it took, and the error or None."""
    from oprows.check import Failure
    from oprows.runner import run_in_runner

    warnings.filterwarnings("ignore")
    family, index, name = job
    begin = time.perf_counter()
    try:
        run_in_runner(op_rows(family)[index])
        error = None
    except Failure as failure:
        error = str(failure)
    except BaseException:  # the op row counts as failed, and the others still run
        error = traceback.format_exc()
    return name, time.perf_counter() - begin, error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", metavar="NAME", help="an op row, an operator or a family")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    parser.add_argument("--rebuild", action="store_true", help="build op_test_runner first")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="number of processes")
    parser.add_argument("--clean-after", action="store_true", help="remove build/op_tests")
    parser.add_argument("-v", "--verbose", action="store_true", help="print a line for each op row that passes")
    options = parser.parse_args()
    if options.j < 1:
        parser.error(f"-j: got {options.j}, expected at least 1")

    jobs = list(selected(options.name))
    if not jobs:
        known = {n for _, _, row in selected(None) for n in (row, row.split("/")[0])} | set(families())
        similar = difflib.get_close_matches(options.name, sorted(known), n=5, cutoff=0.5)
        hint = f"; did you mean {', '.join(similar)}?" if similar else ""
        parser.error(f"no op row, operator or family is called '{options.name}'{hint} (--list prints all op rows)")
    if options.list:
        for family, _, name in jobs:
            print(f"{family:14} {name}")
        return 0

    from oprows import runner

    if options.rebuild:
        _rebuild()
    if not runner.RUNNER.exists():
        parser.error(f"{runner.RUNNER} is not built; pass --rebuild")
    failed = _run(jobs, options)
    if options.clean_after:
        shutil.rmtree(runner.FOLDER, ignore_errors=True)
    print(f"{len(jobs) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _run(jobs: list[tuple[str, int, str]], options: argparse.Namespace) -> int:
    """Run the jobs and print the results. Returns the number of failures."""
    failed = 0
    # Each job runs in one of several processes. Threads would share the state that export keeps.
    with ProcessPoolExecutor(options.j, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, seconds, error in pool.map(run_one, jobs):
            if error is not None:
                failed += 1
                print(f"FAILED {name}\n  " + error.replace("\n", "\n  "), flush=True)
            elif options.verbose:
                print(f"passed {name} ({seconds:.1f} s)", flush=True)
    return failed


def _rebuild() -> None:
    cmake = Path(sys.executable).with_name("cmake")
    build = ROOT / "build"
    flags = ["-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in ([cmake, "-S", ROOT, "-B", build, *flags], [cmake, "--build", build, "--target", "op_test_runner"]):
        if subprocess.run(command).returncode != 0:
            raise SystemExit(f"run_all_tests: command failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    sys.exit(main())
