"""The examples with trained weights that packages carry. One whose packages are missing is skipped."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# The script with its options → the modules and programs that it needs, and what it says about its example.
RUNS = {
    "faces.py": (["facenet_pytorch", "skimage"], "1 faces"),
    "pitch.py --model tiny": (["matplotlib", "torchcrepe"], "301 windows"),
    "speaker_embeddings.py": (["espeak-ng", "matplotlib", "resemblyzer", "soundfile"], r"croak 2: \d+ frames"),
    "voice_activity.py": (["espeak-ng", "matplotlib", "silero_vad", "soundfile"], r"speech in 1\d\d;"),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_trained_network_agrees_with_torch(run, tmp_path):
    needed, said = RUNS[run]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None and shutil.which(name) is None]:
        pytest.skip(f"missing: {', '.join(missing)}")
    script, *options = run.split()
    command = [sys.executable, EXAMPLES / script, *options, "--plot", tmp_path / "plot.png"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    cosines = [float(value) for value in re.findall(r"cosine to torch ([\d.]+)", done.stdout)]
    assert cosines and min(cosines) >= 0.9999
    assert re.search(said, done.stdout)
    assert (tmp_path / "plot.png").stat().st_size > 0
