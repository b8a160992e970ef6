"""EXECUTORCH_MLX_BUILD names the build whose libraries Python loads."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = "from executorch_mlx import load_delegate; print(load_delegate())"


def load(folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"EXECUTORCH_MLX_BUILD": str(folder)}
    return subprocess.run([sys.executable, "-c", SOURCE], env=environment, capture_output=True, text=True)


def test_delegate_of_another_build(delegate, tmp_path):
    for library in Path(delegate).parent.glob("libmlx_*"):
        (tmp_path / library.name).write_bytes(library.read_bytes())
    done = load(tmp_path)
    assert done.stdout.strip() == str(tmp_path / Path(delegate).name), done.stderr


def test_build_without_delegate(tmp_path):
    done = load(tmp_path)
    assert done.returncode == 1 and f"libmlx_delegate is not built (searched {tmp_path}" in done.stderr
