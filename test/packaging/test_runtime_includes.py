"""Outside `ops/cpu`, the C++ runtime uses no CPU kernels directly, and no headers of MLX's device backends."""

import re
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[2] / "backends" / "mlx" / "runtime"
CPU = RUNTIME / "ops/cpu"
KERNELS = RUNTIME / "kernels/cpu"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def neutral_files() -> list[Path]:
    return sorted(
        file
        for suffix in (".h", ".cpp")
        for file in RUNTIME.rglob(f"*{suffix}")
        if not {CPU, KERNELS} & {*file.parents}
    )


def violations(source: str, folder: Path = RUNTIME) -> list[str]:
    """The includes of MLX's backends, of kernels, and of headers in `ops/cpu` other than cpu_kernels.h.

    `source` is the content of a file in `folder`.
    """
    found = []
    for include in INCLUDE.findall(source):
        # The compiler searches the folder of the file and RUNTIME.
        candidates = ((base / include).resolve() for base in (folder, RUNTIME))
        header = next((path for path in candidates if path.exists()), None)
        is_in_cpu = header is not None and bool({CPU, KERNELS} & {*header.parents})
        if include.startswith("mlx/backend/") or (is_in_cpu and header != CPU / "cpu_kernels.h"):
            found.append(include)
    return found


@pytest.mark.parametrize("file", neutral_files(), ids=lambda file: str(file.relative_to(RUNTIME)))
def test_runtime_includes_are_device_neutral(file):
    assert violations(file.read_text(), file.parent) == []


def test_files_outside_cpu_are_checked():
    assert len(neutral_files()) > 20


@pytest.mark.parametrize(
    "source",
    [
        "#include <mlx/backend/cpu/encoder.h>",
        "# include <mlx/backend/cuda/cuda.h>",
        '#pragma once\n#include "mlx/backend/metal/metal.h"',
        '#include "ops/cpu/primitive.h"',
        '#include "../kernels/cpu/matmul.h"',
    ],
)
def test_device_specific_include_is_found(source):
    assert len(violations(source, RUNTIME / "ops")) == 1


@pytest.mark.parametrize("source", ["#include <mlx/mlx.h>", '#include "ops/cpu/cpu_kernels.h"', "#include <vector>"])
def test_neutral_include_is_accepted(source):
    assert violations(source) == []
