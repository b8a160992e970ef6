"""Packs what a GPU machine without network needs to run benchmarks/cuda/run.py. README.md says how to use it.

    python benchmarks/cuda/pack.py BUNDLE --site SITE --build BUILD --program PROGRAM.pte [--llama-cpp SOURCES]

The bundle is a folder with run.sh and one archive. To keep it small, libmlx keeps only the device code for `--arch`,
and the programs lose their large weights. In place of these, run.py writes random bfloat16 numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import fused
import rows
import sampler
import sequences
import training

ROOT = Path(__file__).resolve().parents[2]
LARGE_SEGMENT = 1 << 20  # bytes: the bundle leaves out the segments of a program that have at least this size
OUR_LIBRARIES = (
    "libmlx_delegate.so",
    "libmlx_cpu_kernels.so",
    "libmlx_llm_engine.so",
    "mlx_llm_runner",
    "op_test_runner",
)
# What the two benchmarks of llama.cpp are compiled from.
LLAMA_CPP_PARTS = (
    *("CMakeLists.txt", "LICENSE", "cmake", "include", "src", "common", "vendor", "gguf-py/gguf"),
    *("ggml/CMakeLists.txt", "ggml/cmake", "ggml/include", "ggml/src", "tools/llama-bench", "tools/batched-bench"),
)
LLAMA_CPP_TOOLS = "llama_add_compile_flags()\nadd_subdirectory(batched-bench)\nadd_subdirectory(llama-bench)\n"
# A CUDA library has its device code in containers, "fat binaries". An entry of kind CUBIN is machine code.
FATBIN_MAGIC, CUBIN = 0xBA55ED50, 2
RUN_SCRIPT = """#!/bin/sh
# Unpacks the bundle and runs the benchmark. Arguments go to run.py.
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=${ROOT:-/tmp/executorch-mlx-cuda}
[ -d "$root/site" ] || { mkdir -p "$root" && tar -xJf "$here/bundle.tar.xz" -C "$root"; }
purelib=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cuda=$(printf "%s:" "$purelib"/nvidia/*/lib)
export LD_LIBRARY_PATH="$root/lib:$root/site/executorch/lib:$root/site/mlx/lib:$cuda:$LD_LIBRARY_PATH"
export PYTHONPATH="$root/package:$root/site" EXECUTORCH_MLX_BUILD="$root/lib" PYTHONUNBUFFERED=1
[ $# -gt 0 ] || python3 "$root/cuda/sampler.py" "$root/programs/sampler.pte"
[ $# -gt 0 ] || python3 "$root/cuda/fused.py" "$root/programs"
[ $# -gt 0 ] || python3 "$root/cuda/sequences.py" "$root/programs"
[ $# -gt 0 ] || python3 "$root/cuda/rows.py" "$root/programs"
[ $# -gt 0 ] || python3 "$root/cuda/training.py" check "$root/programs"
exec python3 "$root/cuda/run.py" --root "$root" "$@"
"""


def keep_architecture(source: Path, target: Path, architecture: int) -> None:
    """Copy a library, and overwrite the device code for all other architectures with zeros, which compress well."""
    data = bytearray(source.read_bytes())
    at = data.find(struct.pack("<IHH", FATBIN_MAGIC, 1, 16))
    while at >= 0:
        entry, end = at + 16, at + 16 + struct.unpack_from("<Q", data, at + 8)[0]
        while entry < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
            if (kind, struct.unpack_from("<I", data, entry + 28)[0]) != (CUBIN, architecture):
                data[entry + header : entry + header + size] = bytes(size)
            entry += header + size
        at = data.find(struct.pack("<IHH", FATBIN_MAGIC, 1, 16), end)
    target.write_bytes(data)


def write_without_weights(program: Path, folder: Path) -> None:
    """Write the program without its large segments, and a JSON file with the offsets and sizes of these."""
    from executorch.exir._serialize._flatbuffer import _program_flatbuffer_to_json

    with program.open("rb") as file:
        header = file.read(64)
        # The extended header of a .pte: the size of the FlatBuffer, and the offset of the first segment.
        size, base = struct.unpack_from("<QQ", header, header.index(b"eh00") + 8)
        file.seek(0)
        segments = json.loads(_program_flatbuffer_to_json(file.read(size)))["segments"]
        places = sorted((base + s.get("offset", 0), s.get("size", 0)) for s in segments)
        gaps = [(offset, count) for offset, count in places if count >= LARGE_SEGMENT]
        with (folder / f"{program.stem}.without_weights").open("wb") as out:
            position = 0
            for offset, count in [*gaps, (program.stat().st_size, 0)]:
                file.seek(position)
                out.write(file.read(offset - position))
                position = offset + count
    (folder / f"{program.stem}.json").write_text(json.dumps({"size": program.stat().st_size, "gaps": gaps}))


def copy_llama_cpp(sources: Path, target: Path) -> None:
    """Copy the sources without other tools, and without the backends for other devices than CUDA and the CPU."""

    def other_backends(folder, names):
        backends = {name for name in names if name.startswith("ggml-") and (Path(folder) / name).is_dir()}
        return backends - {"ggml-cpu", "ggml-cuda"} if Path(folder).name == "src" else set()

    for part in LLAMA_CPP_PARTS:
        (target / part).parent.mkdir(parents=True, exist_ok=True)
        if (sources / part).is_dir():
            shutil.copytree(sources / part, target / part, ignore=other_backends)
        else:
            shutil.copy(sources / part, target / part)
    (target / "tools/CMakeLists.txt").write_text(LLAMA_CPP_TOOLS)


def pack(root: Path, options: argparse.Namespace) -> None:
    site = root / "site"
    shutil.copytree(options.site / "mlx", site / "mlx", ignore=shutil.ignore_patterns("include", "lib", "share"))
    for headers in ("cccl", "cute", "cutlass"):  # of the kernels that MLX compiles at run time
        shutil.copytree(options.site / "mlx/include" / headers, site / "mlx/include" / headers)
    (site / "mlx/lib").mkdir()
    keep_architecture(options.site / "mlx/lib/libmlx.so", site / "mlx/lib/libmlx.so", options.arch)
    for libraries in options.site.glob("mlx_cuda_*.libs"):
        shutil.copytree(libraries, site / libraries.name)
    shutil.copytree(options.site / "mlx_lm", site / "mlx_lm")
    (site / "executorch/lib").mkdir(parents=True)
    for library in (options.site / "executorch/lib").glob("*.so"):
        shutil.copy(library, site / "executorch/lib")
    (root / "lib").mkdir()
    for name in OUR_LIBRARIES:
        shutil.copy(options.build / name, root / "lib")
    shutil.copytree(
        ROOT / "backends/mlx",
        root / "package/executorch_mlx",
        ignore=shutil.ignore_patterns("runtime", "engine", "__pycache__"),
    )
    shutil.copytree(ROOT / "benchmarks/cuda", root / "cuda", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "programs").mkdir()
    sampler.export(str(root / "programs/sampler.pte"))
    fused.export(root / "programs")
    sequences.export(root / "programs")
    rows.export(root / "programs")
    if options.llama_cpp:
        copy_llama_cpp(options.llama_cpp, root / "llama.cpp")
    training.export_checks(root / "programs")
    for program in options.program:
        write_without_weights(program, root / "programs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--site", type=Path, required=True, help="folder with the unpacked wheels")
    parser.add_argument("--build", type=Path, required=True, help="build folder of this project")
    parser.add_argument("--program", type=Path, action="append", default=[], help=".pte file to measure")
    parser.add_argument("--llama-cpp", type=Path, help="folder with the sources of llama.cpp")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times 10")
    options = parser.parse_args()
    options.bundle.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        pack(root, options)
        archive = options.bundle.resolve() / "bundle.tar.xz"
        names = sorted(p.name for p in root.iterdir())
        subprocess.run(["tar", "-cf", archive, "-I", "xz -3 -T0", "-C", root, *names], check=True)
    (options.bundle / "run.sh").write_text(RUN_SCRIPT)
    print(f"{archive}: {archive.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()
