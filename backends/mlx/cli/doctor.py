"""executorch-mlx doctor"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from .._load import blas, load_delegate
from .model import quiet

_WHEELS = ("torch", "executorch", "mlx")
_BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")  # all of them bring a libmlx


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="look the installation over",
        description="Shows versions, libraries and device, and runs one small program. Ends with 1 if something is wrong.",
    )
    parser.add_argument("--library", metavar="PATH", help="this build of the delegate, not the one installed")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    wrong: list[str] = []
    print(f"python       {platform.python_version()} {sys.executable}")
    print(f"platform     {platform.platform()}")
    absent = "runs from its sources"
    for name in ("executorch-mlx", *_WHEELS):
        print(f"{name:<12} {_version(name) or absent}")
        absent = "not installed"
    wrong += _requirements()
    backends = [f"{name} {version}" for name in _BACKENDS if (version := _version(name))]
    print(f"{'mlx backend':<12} {', '.join(backends) or 'none'}")
    if len(backends) > 1:
        wrong.append(f"several wheels write the same libmlx: {', '.join(backends)}; keep one of them")
    elif not backends and sys.platform != "darwin":
        wrong.append("mlx has no backend here: pip install 'mlx[cpu]', 'mlx[cuda12]' or 'mlx[cuda13]'")
    wrong += _delegate(options.library)
    for sentence in wrong:
        print(f"wrong: {sentence}")
    if not wrong:
        print("all is well")
    return 1 if wrong else 0


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[str]:
    """The wheels that are not the ones this package was built for: the C++ of it follows their headers."""
    from packaging.requirements import Requirement

    try:
        required = importlib.metadata.requires("executorch-mlx") or []
    except importlib.metadata.PackageNotFoundError:
        return  # it runs from its sources, which pip knows nothing of
    for requirement in map(Requirement, required):
        if requirement.marker is not None:  # an extra
            continue
        found = _version(requirement.name)
        if found is None:
            yield f"{requirement.name} is not installed, {requirement} is needed"
        elif not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} {found} is installed, {requirement} is needed"


def _delegate(library: str | None) -> Iterator[str]:
    try:
        path = load_delegate(library)
    except (OSError, RuntimeError) as error:  # FileNotFoundError is an OSError
        print(f"{'delegate':<12} not loaded")
        yield str(error)
        return
    print(f"{'delegate':<12} {path}")
    version = ctypes.CDLL(path).executorch_mlx_version
    version.restype = ctypes.c_char_p
    built, installed = version().decode(), _version("executorch-mlx")
    if installed is not None and built != installed:
        yield f"the delegate {path} is of version {built}, the Python package of {installed}: build it again"
    for name in ("libexecutorch", "libmlx"):
        print(f"{name:<12} {_mapped(name) or 'loaded, its place is not known here'}")
    import mlx.core as mx

    print(f"{'device':<12} {mx.default_device()}; metal {mx.metal.is_available()}, cuda {mx.cuda.is_available()}")
    print(f"{'blas on cpu':<12} {blas(path)}")
    if sys.platform == "linux" and blas(path) == "mlx":
        print(f"{'':<12} many times slower than OpenBLAS: pip install scipy-openblas32")
    with quiet():
        problem = _run_program()
    print(f"{'program':<12} {'runs' if problem is None else 'does not run'}")
    if problem is not None:
        yield problem


def _mapped(name: str) -> str | None:
    """Where the loaded library is, on systems that tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    files = {line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if len(line.split(maxsplit=5)) == 6}
    found = sorted(f for f in files if Path(f).name.split(".")[0] == name)
    return ", ".join(found) or None


def _run_program() -> str | None:
    """Exports a small module, runs it through ExecuTorch; what is wrong, or None."""
    import torch
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    from ..partitioner import MLXPartitioner

    class Small(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x, dim=-1) * 2 + 1

    x = torch.arange(9.0).reshape(3, 3) / 8
    partitioner = MLXPartitioner()
    edge = to_edge_transform_and_lower(torch.export.export(Small(), (x,)), partitioner=[partitioner])
    if refused := partitioner.explain().refused:
        return f"a small program does not lower: {refused[0].target}: {refused[0].reason}"
    program = Runtime.get().load_program(edge.to_executorch().buffer)
    try:
        (result,) = program.load_method("forward").execute([x])
    except RuntimeError as error:
        return f"a small program does not run: {error}"
    difference = (result - Small()(x)).abs().max().item()
    return None if difference < 1e-4 else f"a small program is off by {difference:g}"
