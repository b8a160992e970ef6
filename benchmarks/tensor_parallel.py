"""Compares the decode speed on several processes with that on one.

    python benchmarks/tensor_parallel.py                                  # Qwen3-0.6B's architecture, int4, 2 processes
    python benchmarks/tensor_parallel.py --layers 4 --processes 4
    python benchmarks/tensor_parallel.py --model model.pte --whole whole.pte --processes 2

Without `--model`, the model has random weights, and the script exports both the model in parts and the whole model.
Runs with several processes and with one process alternate, and the best of the repeats counts. Each run begins with a
new process of rank 0, which starts the processes of all other ranks. The output is a line with the tokens per second of
a greedy decode after a prompt, their ratio, and the number of equal tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPE = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WARM_UP = 8  # tokens that do not count


def export(folder: Path, layers: int, processes: int, quantize: str) -> tuple[Path, Path]:
    import torch
    from executorch_mlx.llm.export import export_llm
    from transformers import Qwen3Config, Qwen3ForCausalLM

    paths = folder / "whole.pte", folder / "model.pte"
    for path, parts in zip(paths, (1, processes)):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=layers)).eval()
        exported = export_llm(
            model, quantize=quantize, max_context_len=1024, chunk=256, speculation=False, verify=False,
            allow_extensions=True, tensor_parallel=parts,
        )  # fmt: skip
        exported.save(path)
    return paths


def decode(path: str, processes: int, prompt: int, tokens: int) -> dict:
    """Decode, with this process as rank 0. Return the tokens per second, the prompt's seconds and the tokens."""
    from executorch_mlx import LLM

    llm = LLM.load(path, hosts=["localhost"] * processes if processes > 1 else None, reuse_prompts=False)
    generator = random.Random(0)
    ids = [generator.randrange(llm.program.vocab_size) for _ in range(prompt)]
    llm.generate(ids, max_new_tokens=WARM_UP, ignore_eos=True, draft=0).result()
    answer = llm.generate(ids, max_new_tokens=WARM_UP + tokens, ignore_eos=True, draft=0)
    ends = [time.perf_counter() for _ in answer]
    speed = (len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1])
    result = {"speed": speed, "prompt": answer.result().metrics.prompt_seconds, "tokens": answer.tokens}
    llm.close()
    return result


def measure(path: Path, processes: int, options: argparse.Namespace) -> dict:
    arguments = ["--decode", str(path), "--processes", str(processes), "--prompt", str(options.prompt)]
    command = [sys.executable, __file__, *arguments, "--tokens", str(options.tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="model in parts: the name without the number")
    parser.add_argument("--whole", type=Path, help="the same model in one part")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--quantize", default="int4")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the decode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--decode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decode:
        return print(json.dumps(decode(options.decode, options.processes, options.prompt, options.tokens)))
    with tempfile.TemporaryDirectory() as folder:
        whole, model = options.whole, options.model
        if model is None:
            whole, model = export(Path(folder), options.layers, options.processes, options.quantize)
        one, several = [], []
        for _ in range(options.repeats):
            one.append(measure(whole, 1, options))
            several.append(measure(model, options.processes, options))
    slow, fast = (max(results, key=lambda result: result["speed"]) for results in (one, several))
    same = sum(a == b for a, b in zip(slow["tokens"], fast["tokens"]))
    print(
        f"decode: {options.processes} processes {fast['speed']:.2f} tokens/s, 1 process {slow['speed']:.2f} tokens/s, "
        f"ratio {fast['speed'] / slow['speed']:.2f}; prompt of {options.prompt}: {fast['prompt']:.3f} s over "
        f"{slow['prompt']:.3f} s; {same} of {len(slow['tokens'])} tokens equal"
    )


if __name__ == "__main__":
    main()
