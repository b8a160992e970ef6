"""The peak memory of an export, relative to the size of the weights.

    python benchmarks/export_memory.py [--layers 14] [--quantize int4] [--dtype float32]

Writes a checkpoint of random bfloat16 weights with the architecture of Qwen3-0.6B and a vocabulary of
32,768 tokens, and exports the checkpoint. `all` is the resident memory of this process, and `anonymous`
is the part of this memory that is not pages of files. The memory after the imports is subtracted from both.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WRITE_CHECKPOINT = """
import sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.set_default_dtype(torch.bfloat16)
Qwen3ForCausalLM(Qwen3Config(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=int(sys.argv[2]), num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=32768, max_position_embeddings=2048,
    tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, dtype=torch.bfloat16,
)).save_pretrained(sys.argv[1])
"""


def resident() -> dict[str, float]:
    """The resident memory of this process in MiB, by kind: `all` and `anonymous`. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":") for line in lines if line.startswith(("VmRSS", "RssAnon")))
    return {"all": int(found["VmRSS"].split()[0]) / 1024, "anonymous": int(found["RssAnon"].split()[0]) / 1024}


class Peaks:
    """Records the highest resident memory of each kind in every step."""

    def __init__(self):
        self.step, self.steps = "import", {}
        threading.Thread(target=self._watch, daemon=True).start()

    def enter(self, step: str) -> None:
        self.step = step

    def _watch(self) -> None:
        while True:
            highest = self.steps.setdefault(self.step, {})
            for kind, size in resident().items():
                highest[kind] = max(highest.get(kind, 0), size)
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--quantize", default="int4")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", WRITE_CHECKPOINT, folder, str(options.layers)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        measure(Path(folder), options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    import torch
    from executorch_mlx.llm.export import export_llm
    from executorch_mlx.llm.export.weights import load_causal_lm

    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2**20
    base, peaks = resident(), Peaks()
    peaks.enter("load")
    exported = export_llm(
        load_causal_lm(folder),
        quantize=options.quantize,
        dtype=getattr(torch, options.dtype),
        max_context_len=512,
        verify=False,
        progress=peaks.enter,
    )
    peaks.enter("save")
    size = exported.save(folder / "model.pte") / 2**20
    time.sleep(0.1)
    print(f"weights {weights:.0f} MiB, .pte {size:.0f} MiB, before the load {base['all']:.0f} MiB")
    for step, highest in peaks.steps.items():
        above = {kind: highest[kind] - base[kind] for kind in base}
        ratios = ", ".join(f"{kind} {mib:.0f} MiB = {mib / weights:.2f} x" for kind, mib in above.items())
        print(f"{step:20} {ratios}")


if __name__ == "__main__":
    main()
