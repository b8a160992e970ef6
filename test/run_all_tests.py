"""Every op test in the C++ runtime: export, run `op_test_runner`, compare with torch.

    python test/run_all_tests.py [NAME] [--list] [--rebuild] [-j N] [--clean-after] [-v]

NAME is a row (`exp`, `sum.dim_IntList/all`), an operator (all its rows) or a family
(`elementwise`). Exit code 0 if all pass, 1 if one fails, 2 for a wrong command line.
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def families() -> list[str]:
    return sorted(p.stem.removeprefix("test_") for p in (HERE / "ops").glob("test_*.py"))


def rows_of(family: str) -> list:
    for folder in (HERE, HERE / "ops"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return getattr(importlib.import_module(f"test_{family}"), "ROWS", [])


def selected(name: str | None) -> Iterator[tuple[str, int, str]]:
    """(family, index, row name) of the rows that NAME means."""
    for family in families():
        for i, row in enumerate(rows_of(family)):
            if name in (None, family, row.name, row.name.split("/")[0], row.target) or (
                row.name.split("/")[0].partition(".")[0] == name
            ):
                yield family, i, row.name


def run_one(job: tuple[str, int, str]) -> tuple[str, float, str | None]:
    """Name, seconds, and what went wrong."""
    from oprows.check import Failure
    from oprows.program import run_in_program

    warnings.filterwarnings("ignore")
    family, index, name = job
    begin = time.perf_counter()
    try:
        run_in_program(rows_of(family)[index])
        problem = None
    except Failure as failure:
        problem = str(failure)
    except BaseException:  # one broken row must not end the others; it is reported as failed
        problem = traceback.format_exc()
    return name, time.perf_counter() - begin, problem


def _initialize() -> None:
    rows_of(families()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", metavar="NAME", help="a row, an operator or a family")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--rebuild", action="store_true", help="build op_test_runner first")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="rows at a time")
    parser.add_argument("--clean-after", action="store_true", help="remove build/op_tests")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for every row")
    options = parser.parse_args()
    if options.j < 1:
        parser.error(f"-j: {options.j} is not a number of rows at a time")

    jobs = list(selected(options.name))
    if not jobs:
        known = {n for _, _, row in selected(None) for n in (row, row.split("/")[0])} | set(families())
        near = difflib.get_close_matches(options.name, sorted(known), n=5, cutoff=0.5)
        hint = f"; near it: {', '.join(near)}" if near else ""
        parser.error(f"no op test is called '{options.name}'{hint} (--list names them all)")
    if options.list:
        for family, _, name in jobs:
            print(f"{family:12} {name}")
        return 0

    from oprows import program

    if options.rebuild:
        _rebuild()
    if not program.PROGRAM.exists():
        parser.error(f"{program.PROGRAM} is not built: pass --rebuild")
    failed = _run(jobs, options)
    if options.clean_after:
        shutil.rmtree(program.FOLDER, ignore_errors=True)
    print(f"{len(jobs) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _run(jobs: list[tuple[str, int, str]], options: argparse.Namespace) -> int:
    failed = 0
    # Processes of their own: export keeps state that threads would share.
    with ProcessPoolExecutor(
        options.j, mp_context=multiprocessing.get_context("spawn"), initializer=_initialize
    ) as pool:
        for name, seconds, problem in pool.map(run_one, jobs):
            if problem is not None:
                failed += 1
                print(f"FAILED {name}\n  " + problem.replace("\n", "\n  "), flush=True)
            elif options.verbose:
                print(f"passed {name} ({seconds:.1f} s)", flush=True)
    return failed


def _rebuild() -> None:
    cmake = Path(sys.executable).with_name("cmake")
    build = ROOT / "build"
    flags = ["-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in ([cmake, "-S", ROOT, "-B", build, *flags],
                    [cmake, "--build", build, "--target", "op_test_runner"]):
        if subprocess.run(command).returncode != 0:
            raise SystemExit(f"run_all_tests: {' '.join(map(str, command))} failed")


if __name__ == "__main__":
    sys.exit(main())
