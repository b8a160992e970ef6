"""What `doctor` says of a sound installation, and of ones with something wrong."""

import os
import subprocess
import sys

import pytest


def doctor(*arguments, **environment) -> tuple[int, str]:
    """In a process of its own: a delegate is registered once."""
    done = subprocess.run(
        [sys.executable, "-m", "executorch_mlx.cli.main", "doctor", *map(str, arguments)],
        capture_output=True, text=True, env=os.environ | environment, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_sound_installation(delegate):
    code, out = doctor()
    assert code == 0, out
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert facts["executorch"] == "1.5.1" and facts["torch"].startswith("2.13.0")
    assert facts["delegate"] == delegate
    assert "libmlx" in facts["libmlx"] and facts["program"] == "runs"
    assert "wrong:" not in out


@pytest.mark.parametrize("make", [None, b"no library"])
def test_no_delegate(tmp_path, make):
    library = tmp_path / "libmlx_delegate.so"
    if make is not None:
        library.write_bytes(make)
    code, out = doctor("--library", library)
    assert code == 1
    (wrong,) = [line for line in out.splitlines() if line.startswith("wrong:")]
    assert str(library) in wrong


def test_a_device_that_is_not_here(delegate):
    code, out = doctor(EXECUTORCH_MLX_DEVICE="nowhere")
    assert code == 1 and "does not run" in out
