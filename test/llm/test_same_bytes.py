"""Two processes that export the same model write the same bytes, whatever the hash seeds of their strings are.

Run as a script, this file exports the models into a folder.
"""

import os
import subprocess
import sys
from pathlib import Path

import small_llm
from executorch_mlx.llm.export import HeadConfig, export_llm
from test_families import ALTERNATING, random_model
from test_more_families import EXPORTED

OPTIONS = {"chunk": 16, "max_context_len": 64, "head": HeadConfig.minimal(), "verify": False, "speculation": False}


def export_all(folder: Path) -> None:
    head = HeadConfig(logit_bias=4, logprobs=2)
    small_llm.export(folder / "quantized.pte", outputs="both", quantize="int4", head=head)
    *gemma4, _ = EXPORTED["shared caches"]
    export_llm(random_model(*gemma4), **OPTIONS).save(folder / "shared_caches.pte")
    print(*set(ALTERNATING))  # one of the sets of strings that the models iterate over


def exported(folder: Path, hash_seed: int) -> tuple[str, dict[str, bytes]]:
    """Return what a process with this hash seed prints, and the contents of its files."""
    folder.mkdir()
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, __file__, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_hash_seed_changes_no_byte(tmp_path):
    (order, files), (other_order, other_files) = (exported(tmp_path / str(seed), seed) for seed in (1, 2))
    assert order != other_order  # otherwise, these hash seeds would prove nothing
    assert [*files] == [*other_files] == ["quantized.pte", "shared_caches.pte"]
    assert [name for name in files if files[name] != other_files[name]] == []


if __name__ == "__main__":
    export_all(Path(sys.argv[1]))
