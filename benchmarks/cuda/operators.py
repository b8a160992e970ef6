"""Runs the op rows of test/ops on the GPU and compares the results with eager torch.

    python benchmarks/cuda/operators.py export FOLDER [NAME]   writes programs, inputs and results; needs no GPU
    python benchmarks/cuda/operators.py FOLDER                 runs the programs, eight at a time

NAME is an op row, an operator or a family, as for test/run_all_tests.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from op_runner import command, read

PROCESSES = 8
TIMEOUT = 120  # seconds


def export(folder: Path, name: str | None) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))
    from oprows import tensor_file
    from oprows.lowering import lower
    from oprows.row import TOLERANCE
    from run_all_tests import op_rows, selected

    rows = []
    for family, index, _ in selected(name):
        row = op_rows(family)[index]
        lowered = lower(row)
        target = folder / row.slug
        for call, (inputs, expected) in enumerate(lowered.calls):
            tensor_file.write_all(target / "inputs" / str(call), inputs)
            tensor_file.write_all(target / "expected" / str(call), expected)
        (target / "model.pte").write_bytes(lowered.pte)
        tolerance = {str(dtype): row.tolerance(dtype) for dtype in TOLERANCE}
        rows.append({"name": row.name, "slug": row.slug, "calls": row.calls, "tolerance": tolerance})
        print(row.name, flush=True)
    (folder / "operators.json").write_text(json.dumps(rows))


def difference(got: torch.Tensor, expected: torch.Tensor, tolerance: dict) -> str | None:
    """Describe how the tensors differ; None if they agree. The signs of zeros may differ."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"got {got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
    rtol, atol = tolerance.get(str(expected.dtype), (0, 0))
    wide = torch.complex128 if expected.is_complex() else torch.float64 if rtol else torch.int64
    close = torch.isclose(got.to(wide), expected.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return None
    at = (~close).nonzero()[0].tolist()
    count = int((~close).sum())
    return f"{count} of {close.numel()} elements differ; at {at}, got {got[tuple(at)]}, expected {expected[tuple(at)]}"


def run(folder: Path, row: dict) -> str | None:
    """Run a program with all its inputs, and return a description of the first error, or None."""
    target = folder / row["slug"]
    inputs = [target / "inputs" / str(call) for call in range(row["calls"])]
    environment = os.environ | {"EXECUTORCH_MLX_DEVICE": os.environ.get("EXECUTORCH_MLX_DEVICE", "gpu")}
    try:
        done = subprocess.run(
            command(target / "model.pte", inputs, target / "outputs"),
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"no result within {TIMEOUT} s"
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.strip()[-400:]}"
    for call in range(row["calls"]):
        for i in range(len(list((target / "expected" / str(call)).iterdir()))):
            got, expected = (read(target / kind / str(call) / f"{i}.tensor") for kind in ("outputs", "expected"))
            error = difference(got, expected, row["tolerance"])
            if error:
                return f"call {call}, output {i} ({expected.dtype}): {error}"
    return None


def main() -> None:
    if sys.argv[1] == "export":
        return export(Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    folder = Path(sys.argv[1])
    rows = json.loads((folder / "operators.json").read_text())
    torch.set_num_threads(1)
    with ThreadPoolExecutor(PROCESSES) as pool:
        errors = list(pool.map(lambda row: run(folder, row), rows))
    for row, error in zip(rows, errors, strict=True):
        if error:
            print(f"{row['name']}: {error}")
    print(f"operators: {errors.count(None)} of {len(rows)} op rows agree with torch")


if __name__ == "__main__":
    main()
