"""`executorch-mlx doctor`"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ..gpu_kernels import Verdict, verdicts
from ..loader import OtherDelegateError, blas_name, cpu_kernels, library_text, load_delegate
from ..quiet import quiet_imports, quiet_lowering
from .errors import CommandError
from .extras import EXPORT, check_installed

_WHEELS = ("torch", "executorch", "mlx")
_BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")  # each installs a libmlx


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Check the installation: print versions, libraries and device, and run a small program. "
        "Exits with 1 if there is an error.",
    )
    parser.add_argument("--library", metavar="PATH", help="delegate library to check (default: the installed one)")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="print what an export of the model in this folder or GGUF file would give, or why the model cannot be "
        "exported; reads only its config.json, or the header of the file",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.model is not None:
        return _run_for_model(options.model)
    _print("python", f"{platform.python_version()} {sys.executable}")
    _print("platform", platform.platform())
    _print("executorch-mlx", _version("executorch-mlx") or "not installed, runs from its sources")
    for name in _WHEELS:
        _print(name, _version(name) or "not installed")
    backends = [f"{name} {version}" for name in _BACKENDS if (version := _version(name))]
    _print("mlx backend", ", ".join(backends) or "none")
    errors = [*_requirement_errors(), *_backend_errors(backends), *_delegate_errors(options.library)]
    print("\n".join(f"error: {error}" for error in errors) or "ok")
    return 1 if errors else 0


def _run_for_model(checkpoint: str) -> int:
    """Print what an export of the model in a folder or GGUF file would give. Returns 1 if it cannot be exported."""
    check_installed("doctor --model", "export", EXPORT)
    with quiet_imports():
        from ..llm.export.survey import survey
    try:
        found = survey(checkpoint)
    except ValueError as error:
        raise CommandError(error) from error
    _print("model", found.architecture)
    if found.parameters is not None:
        _print("parameters", f"{found.parameters / 1e6:,.1f} million")
    if found.obstacle is not None:
        print(f"error: {found.obstacle}")
        return 1
    for description, count in found.layers.items():
        _print("layers", f"{count} with {description}")
    _print("KV caches", f"{found.numbers_per_token} numbers per token, {4 * found.numbers_per_token} bytes in float32")
    _print("delegated", "every call of the model, with the sampling of the token")
    print("ok")
    return 0


def _print(label: str, value: str) -> None:
    print(f"{label:<14} {value}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirement_errors() -> Iterator[str]:
    """Yield an error for each requirement of this package that the installed wheels do not meet."""
    from packaging.requirements import Requirement

    try:
        required = importlib.metadata.requires("executorch-mlx") or []
    except importlib.metadata.PackageNotFoundError:
        return  # the package runs from its sources, without metadata
    for requirement in map(Requirement, required):
        if requirement.marker is not None:  # a requirement of an extra
            continue
        version = _version(requirement.name)
        if version is None:
            yield f"{requirement.name}: not installed, expected {requirement}"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name}: got {version}, expected {requirement}"


def _backend_errors(backends: list[str]) -> Iterator[str]:
    if len(backends) > 1:
        yield f"mlx backend: got {', '.join(backends)}, expected one: each installs its own libmlx at the same path"
    elif not backends and sys.platform != "darwin":
        yield "mlx backend: none is installed: pip install 'mlx[cpu]', 'mlx[cuda12]' or 'mlx[cuda13]'"


def _delegate_errors(library: str | None) -> Iterator[str]:
    """Load the delegate, print its libraries and device, and run a program. Yields the errors."""
    try:
        with quiet_imports():
            path = load_delegate(library)
    except OtherDelegateError as error:
        _print("MLXBackend", "another library")
        yield str(error)
        return
    except (OSError, RuntimeError) as error:  # FileNotFoundError is an OSError
        _print("delegate", "not loaded")
        yield str(error)
        return
    _print("delegate", path)
    _print("MLXBackend", "this delegate")
    built, installed = library_text(path, "executorch_mlx_version"), _version("executorch-mlx")
    if installed is not None and built != installed:
        yield (
            f"delegate: {path} has version {built}, but the Python package has version {installed}; "
            "rebuild the delegate"
        )
    for name in ("libexecutorch", "libmlx"):
        _print(name, ", ".join(sorted(f for f in _loaded_files() if Path(f).name.split(".")[0] == name)))
    import mlx.core as mx

    _print("device", f"{mx.default_device()}; metal {mx.metal.is_available()}, cuda {mx.cuda.is_available()}")
    try:
        _print_gpu_kernels(verdicts())
    except RuntimeError as error:
        yield str(error)
    if kernels := cpu_kernels(path):
        _print("cpu kernels", kernels)
    _print("cpu blas", blas_name(path))
    if sys.platform == "linux" and blas_name(path) == "mlx":
        _print("", "float64 products are many times slower than with OpenBLAS: pip install scipy-openblas32")
    if find_spec("torch") is None:
        _print("program", "not checked: exports need torch, which pip install 'executorch-mlx[export]' brings")
        return
    with quiet_imports(), quiet_lowering():
        failure = _program_error()
    _print("program", "runs" if failure is None else "failed")
    if failure is not None:
        yield f"program: {failure}"


def _print_gpu_kernels(kernels: list[Verdict]) -> None:
    """Print a line for each kernel of the GPU: its verdict, its error, and the times with it and without it."""
    for kernel in kernels:
        if kernel.verdict in ("used", "slow"):
            times = f"{kernel.microseconds:,.0f} us, without it {kernel.microseconds_without:,.0f} us"
            details = f"error {kernel.error:.1g}, {times}"
        elif kernel.verdict == "wrong":
            details = f"error {kernel.error:.1g}"
        else:
            details = kernel.reason or ("on" if kernel.is_used else "off")
        _print("gpu kernels" if kernel is kernels[0] else "", f"{kernel.kernel:<18} {kernel.verdict:<8} {details}")


def _loaded_files() -> set[str]:
    """Return the paths of the files that this process has loaded or mapped, among them its libraries."""
    if sys.platform == "darwin":
        dyld = ctypes.CDLL(None)
        dyld._dyld_get_image_name.restype = ctypes.c_char_p
        return {dyld._dyld_get_image_name(i).decode() for i in range(dyld._dyld_image_count())}
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {fields[5].strip() for fields in lines if len(fields) == 6}


def _program_error() -> str | None:
    """Export a small module and run it through ExecuTorch. Returns the error, or None if the result is correct."""
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
        return f"a small program cannot be lowered: {refused[0].target}: {refused[0].reason}"
    program = Runtime.get().load_program(edge.to_executorch().buffer)
    try:
        (result,) = program.load_method("forward").execute([x])
    except RuntimeError as error:
        return f"a small program does not run: {error}"
    difference = (result - Small()(x)).abs().max().item()
    return None if difference < 1e-4 else f"a small program differs from torch by {difference:g}"
