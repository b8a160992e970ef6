"""Tokens per second of this delegate, mlx-lm, compiled torch and llama.cpp on an NVIDIA GPU.

`pack.py` makes a bundle, a folder for a GPU machine without a network. The script run.sh of the bundle calls this file.
Each program of the bundle is named after its shape; the other sides run a model of the same shape. Weights are random.
Each of the SIDES runs in a process of its own; llama.cpp runs if the bundle has its sources. A speed is the best of six
runs, because the host limits how fast a small model decodes, and the speed of the host varies. `decode at N` is the
speed of 100 tokens after a prompt of N tokens, without the first ten or eleven. `sampled` has temperature 0.8, top_p
0.9 and top_k 40.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from shapes import SHAPES

SIDES = ("ours", "mlx_lm_side", "torch_side", "llama_cpp_side")  # scripts in this folder


def write_program(root: Path, name: str) -> Path:
    """Write the program, with random bfloat16 numbers for the weights that the bundle lacks. Return its path."""
    program = root / "programs" / f"{name}.pte"
    if program.exists():
        return program
    without_weights = (root / "programs" / f"{name}.without_weights").read_bytes()
    places = json.loads((root / "programs" / f"{name}.json").read_text())
    rng = np.random.default_rng(0)
    block = (rng.standard_normal(1 << 24, dtype=np.float32) * 0.02).view(np.uint32) >> 16
    block = block.astype(np.uint16).tobytes()
    with program.open("wb") as out:
        taken = 0
        for offset, size in [*places["gaps"], (places["size"], 0)]:
            count = offset - out.tell()
            out.write(without_weights[taken : taken + count])
            taken += count
            # A different part of the block for every weight, so that no two are equal.
            start = 2 * int(rng.integers(0, 1 << 20))
            while size > 0:
                size -= out.write(block[start : start + size])
                start = 0
    return program


def measure(side: str, root: Path, name: str) -> dict[str, float]:
    argument = write_program(root, name) if side == "ours" else name
    command = [sys.executable, str(root / "cuda" / f"{side}.py"), str(argument)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        print(f"{side}: failed\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        return {}
    print(done.stderr[-600:], end="")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--only", choices=SIDES, action="append", help="measure this side only")
    parser.add_argument("--program", action="append", help="name of a program of the bundle")
    options = parser.parse_args()
    packed = {p.stem for p in (options.root / "programs").glob("*.json")}
    names = options.program or [shape for shape in SHAPES if shape in packed]
    columns = {}
    sides = [side for side in SIDES if side != "llama_cpp_side" or (options.root / "llama.cpp").exists()]
    for side in options.only or sides:
        for name in names:
            columns[side, name] = measure(side, options.root, name)
    rows = list(dict.fromkeys(key for column in columns.values() for key in column))
    for line in zip(*columns):
        print(f"{'':28}" + "".join(f"{title:>16}" for title in line))
    for row in rows:
        print(f"{row:28}" + "".join(f"{column.get(row, float('nan')):16.1f}" for column in columns.values()))


if __name__ == "__main__":
    main()
