"""Counts the instructions of the matrix products on arm64, under QEMU, which says nothing about their time.

    python benchmarks/arm64/count_instructions.py

Prints the instructions per product of an activation and a weight, for a matrix [64, 1024] in groups of 64, with the
rounding of the activations. Needs what tools/setup.sh arm64 installs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "linux_arm64"))
import build_arm64_wheel  # noqa: E402
import emulate  # noqa: E402

ELEMENTS = 64 * 1024
ROWS = (1, 4, 16)
INSTRUCTION_SETS = ("portable", "dotprod", "i8mm")
# kernel, bits of the weights, type of the activations: float32, float16 or bfloat16
CASES = {
    "int4, activations in 8 bits": ("int8", 4, 0),
    "int8, activations in 8 bits": ("int8", 8, 0),
    "int4, float32": ("integers", 4, 0),
    "int4, bfloat16": ("integers", 4, 2),
    "int8, bfloat16": ("integers", 8, 2),
    "int4, float32, weights converted to float32": ("quantized", 4, 0),
    "float16": ("halves", 16, 1),
    "bfloat16": ("halves", 16, 2),
}


def executed(counter: Path, program: Path, *arguments: object) -> int:
    """Return the number of executed instructions."""
    qemu, *rest = emulate.command(program)
    command = [qemu, "-plugin", counter, "-E", "OPENBLAS_NUM_THREADS=1", *rest, *arguments]
    return int(subprocess.run(list(map(str, command)), check=True, stderr=subprocess.PIPE).stderr)


def main() -> None:
    if missing := emulate.missing_tool():
        sys.exit(missing)
    library = build_arm64_wheel.build("mlx_cpu_kernels") / "libmlx_cpu_kernels.so"
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        program, counter = Path(folder) / "program", Path(folder) / "counter.so"
        include = ROOT / "backends/mlx/runtime/kernels/cpu"
        source = [here / "count_instructions.cpp", library, f"-Wl,-rpath,{library.parent}", f"-I{include}"]
        for command in (
            [build_arm64_wheel.COMPILER, "-std=c++20", "-O1", *source, "-o", program],
            ["cc", "-O1", "-shared", "-fPIC", here / "instruction_counter.c", "-o", counter],
        ):
            subprocess.run(list(map(str, command)), check=True)
        print(f"| instructions per product, rows | {' | '.join(f'{s}, {r}' for s in INSTRUCTION_SETS for r in ROWS)} |")
        print("|---|" + "---:|" * (len(INSTRUCTION_SETS) * len(ROWS)))
        for title, (kernel, bits, dtype) in CASES.items():
            cells = []
            for isa in INSTRUCTION_SETS:
                for rows in ROWS:
                    once, twice = (
                        executed(counter, program, isa, kernel, bits, dtype, rows, calls) for calls in (1, 2)
                    )
                    cells.append(f"{(twice - once) / (ELEMENTS * rows):.2f}")
            print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
