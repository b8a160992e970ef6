"""Compiles C++ programs and libraries of tests."""

import shutil
import subprocess
from pathlib import Path


def compile_cpp(output: Path, *arguments: str | Path, compiler: str | None = None) -> Path:
    """Compile to `output` and return it. The arguments are source files and options of the compiler."""
    compiler = compiler or shutil.which("c++") or shutil.which("g++")
    assert compiler, "this test needs a C++20 compiler"
    subprocess.run([compiler, "-std=c++20", *arguments, "-o", output], check=True)
    return output
