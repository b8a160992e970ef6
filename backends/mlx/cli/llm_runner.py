"""The console script `mlx_llm_runner`: replaces its process by the C++ executable of that name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "mlx_llm_runner"


def find_executable() -> Path:
    """Return the executable in the installed package, or else the one in the `build` folder of the repository.

    Raises FileNotFoundError if neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = [package / "bin" / NAME, package.parent.parent / "build" / NAME]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    searched = ", ".join(map(str, candidates))
    raise FileNotFoundError(f"{NAME}: the C++ executable is not built (searched {searched}): run make build")


def console() -> int:
    """The console script. Returns only if there is no executable to run."""
    try:
        executable = find_executable()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    os.execv(executable, [NAME, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(console())
