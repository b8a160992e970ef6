"""A long context takes memory for the positions that are written, on a Linux CPU: see docs/language-models.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cache_memory import two_layers
from executorch_mlx.llm.export import HeadConfig, export_llm

CAPACITY, ROWS = 65536, 4
CACHE_BYTES = 4 * ROWS * CAPACITY * 2 * 64 * 4  # 512 MB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_positions_that_nobody_writes_take_no_memory(tmp_path):
    head = HeadConfig(penalties=8)
    options = {"batch": ROWS, "chunk": 64, "head": head, "speculation": False, "verify": False}
    export_llm(two_layers(CAPACITY), **options).save(tmp_path / "model.pte")
    command = [sys.executable, Path(__file__).with_name("context_memory.py"), tmp_path / "model.pte"]
    printed = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert printed.pop("capacity") == CAPACITY  # by default, the context is the model's own
    assert [*printed] == ["load", "answer", "same beginning", "all rows", "clone", "resume"]
    assert max(printed.values()) < CACHE_BYTES / 8, printed
