"""Compares the tokens of several requests at once on the GPU with those of each request alone, and with the CPU's.

The CPU adds in another order than the GPU. In bfloat16, its tokens therefore differ as soon as two candidates are
nearly equally likely. In int4, activations are bfloat16.

    python benchmarks/cuda/rows.py export FOLDER     writes the programs; needs no GPU
    python benchmarks/cuda/rows.py FOLDER            compares the tokens; run.sh calls it
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

ROWS, TOKENS, RUNS = 8, 48, 3
PROMPTS = [[(17 * i + 5 * key) % 256 for i in range(5 + 17 * key)] for key in range(ROWS)]


def export(folder: Path) -> None:
    import fused
    import torch
    import transformers
    from executorch_mlx.llm.export import HeadConfig, export_llm

    for name, (architecture, changes) in fused.MODELS.items():
        suffix = "TextConfig" if architecture == "Gemma3" else "Config"
        config = getattr(transformers, architecture + suffix)(**fused.SHAPE | changes, eos_token_id=None)
        for format, (dtype, quantization, _) in fused.FORMATS.items():
            torch.manual_seed(0)
            model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(getattr(torch, dtype)).eval()
            head = HeadConfig(allowed_tokens=True)
            options = {"batch": ROWS, "head": head, "max_context_len": 256, "chunk": 64, "verify": False}
            exported = export_llm(model, **options, **quantization)
            exported.save(folder / f"rows-{name}-{format}.pte")


def answers(program: str, device: str) -> None:
    """Print the tokens of each request alone, and those of several runs of all requests together, as JSON."""
    from executorch_mlx import LLM

    odd_tokens = np.full(256 // 32, 0xAAAAAAAA, np.uint32).view(np.int32)
    settings = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7, "top_k": 20}]
    with LLM.load(program, device=device, reuse_prompts=False) as llm:

        def start(key):
            allowed = (lambda tokens: odd_tokens) if key % 2 else None
            options = settings[key // 2 % 2] | {"max_new_tokens": TOKENS, "ignore_eos": True, "draft": 0}
            return llm.generate(PROMPTS[key], allowed_tokens=allowed, **options)

        together = []
        for _ in range(RUNS):
            together += [generation.result().tokens for generation in [start(key) for key in range(ROWS)]]
        alone = [start(key).result().tokens for key in range(ROWS)]
    print(json.dumps({"together": together, "alone": alone * RUNS}))


def main() -> None:
    if sys.argv[1] == "export":
        return export(Path(sys.argv[2]))
    if len(sys.argv) == 3:
        return answers(*sys.argv[1:])
    for program in sorted(Path(sys.argv[1]).glob("rows-*.pte")):
        results = {}
        for device in ("gpu", "cpu"):
            command = [sys.executable, __file__, str(program), device]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[device] = json.loads(done.stdout.splitlines()[-1])

        def equal(a, b):
            return sum(x == y for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))

        gpu, cpu = results["gpu"], results["cpu"]
        together = gpu["together"]
        print(
            f"{program.stem}: of {RUNS * ROWS * TOKENS} tokens, {equal(together, gpu['alone'])} are those of a request "
            f"alone, and {equal(together, cpu['together'])} those of the CPU"
        )
        assert all(token % 2 for key in range(1, ROWS, 2) for token in together[key]), (
            "the mask of allowed tokens holds"
        )


if __name__ == "__main__":
    main()
