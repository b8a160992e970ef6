"""Checks adapters that are loaded while a program runs, and prints the numbers of docs/adapters.md.

    python test/adapter_law.py                                 # 8 adapters, 500 tokens each, 1,000 loads
    python test/adapter_law.py --format int4 --tokens 100 --loads 50
    python test/adapter_law.py --model FOLDER --tokens 100 --loads 50

The model is a checkpoint, or has random weights. The adapters have random weights, and each has another rank. The
script prints

- how many tokens of answers with different adapters, side by side in one batch, differ from those of each answer alone;
- how many of the tokens differ from those without an adapter, which shows that the adapters have an effect;
- in float32, how far the log probabilities of these tokens are from those of models into which the adapters are merged,
  and how many greedy tokens are not the most probable ones of these models;
- how many requests fail, and how many tokens differ, while an adapter is loaded and removed again and again, and by how
  much the memory of the process grows meanwhile;
- how long a step takes without an adapter, beside a program that takes none.

It exits with 1 if a token differs or a request fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.llm.export.checkpoints.adapter import merge_adapter
from small_adapters import write_peft

ROWS, RANK, VOCABULARY = 8, 16, 2048
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11}}
DTYPES = ("float32", "bfloat16", "float16")
MOST_ROUNDING = 2e-3  # of a log probability, in float32


checkpoint: Path | None = None  # of the model


def model() -> torch.nn.Module:
    if checkpoint is not None:
        return hf.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    return hf.Qwen3ForCausalLM(config).eval()


def write_adapter(folder: Path, number: int) -> Path:
    """Write an adapter of the rank 2 * number + 1 for all linear layers of the decoder layers."""
    generator = torch.Generator().manual_seed(number)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.1 if checkpoint is None else 0.02)

    rank = min(2 * number + 1, RANK)
    return write_peft(folder, {n: (draw(rank, inputs), draw(outputs, rank)) for n, inputs, outputs in layers()})


@cache
def layers() -> list[tuple[str, int, int]]:
    """Return the paths and sizes of the linear layers of the decoder layers."""
    found = [(n, m) for n, m in model().named_modules() if isinstance(m, torch.nn.Linear) and "layers" in n]
    return [(name, layer.in_features, layer.out_features) for name, layer in found]


def prompt_of(number: int) -> list[int]:
    return [(7 * number + 13 * i) % VOCABULARY for i in range(5 + number)]


def export(path: Path, format: str, **options: Any) -> Path:
    options |= {"dtype": format} if format in DTYPES else {"quantize": format}
    options |= {"head": HeadConfig(logprobs=1), "speculation": False, "verify": False}
    export_llm(model(), batch=ROWS, max_context_len=1024, **options).save(path)
    return path


def answers(llm: LLM, count: int, together: bool, with_adapters: bool = True, **options: Any) -> list:
    """Return the answers with the adapters of all numbers, or without: side by side, or one after the other."""
    options |= {"max_new_tokens": count, "ignore_eos": True, "logprobs": 0}
    started, results = [], []
    for number in range(ROWS):
        adapter = str(number) if with_adapters else None
        started.append(llm.generate(prompt_of(number), adapter=adapter, **options))
        if not together:
            results.append(started.pop().result())
    return results + [generation.result() for generation in started]


def different_tokens(some: list, others: list) -> int:
    return sum(a != b for x, y in zip(some, others) for a, b in zip(x.tokens, y.tokens, strict=True))


def beside_merged(folder: Path, number: int, answer: Any) -> tuple[float, int]:
    """Compare an answer with the model into which its adapter is merged.

    Returns the largest difference of a log probability, and how many tokens are not the most probable ones.
    """
    merged, prompt = merge_adapter(model(), folder, torch.float32), prompt_of(number)
    tokens = torch.tensor(answer.tokens)
    with torch.no_grad():
        logits = merged(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return (chosen - torch.tensor(answer.logprobs)).abs().max().item(), int((logits.argmax(-1) != tokens).sum())


def check_batches(llm: LLM, folders: list[Path], count: int, format: str) -> int:
    """Print how the answers of a batch differ from those of each adapter alone. Returns the number of tokens."""
    wrong = 0
    for name, sampling in SAMPLINGS.items():
        batch = answers(llm, count, together=True, **sampling)
        alone = answers(llm, count, together=False, **sampling)
        wrong += (differ := different_tokens(alone, batch))
        print(f"{name}: {differ} of {ROWS * count} tokens differ from those of each adapter alone,", end=" ")
        plain = answers(llm, count, together=True, with_adapters=False, **sampling)
        print(f"{different_tokens(plain, batch)} from those without an adapter", flush=True)
        if format == "float32":
            differences, others = zip(*(beside_merged(folders[i], i, answer) for i, answer in enumerate(batch)))
            print(f"{name}: log probabilities differ from those of the merged models by at most {max(differences):.1e}")
            if name == "greedy":
                print(f"{name}: {sum(others)} tokens are not the most probable ones of the merged models", flush=True)
            wrong += max(differences) > MOST_ROUNDING
    return wrong


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024


def check_loads(llm: LLM, folder: Path, loads: int) -> int:
    """Load and remove an adapter while others answer. Returns the number of failed requests and wrong tokens."""
    expected = {i: answer.tokens for i, answer in enumerate(answers(llm, 12, together=False)[: ROWS - 1])}
    problems, is_over, counts = [], threading.Event(), dict.fromkeys(expected, 0)

    def ask(number: int) -> None:
        while not is_over.is_set():
            try:
                answer = llm.generate(
                    prompt_of(number), adapter=str(number), max_new_tokens=12, ignore_eos=True
                ).result()
                counts[number] += 1
                problems.extend([] if answer.tokens == expected[number] else [number])
            except Exception as error:  # counted
                problems.append(error)

    llm.unload_adapter(str(ROWS - 1))
    threads = [threading.Thread(target=ask, args=[number]) for number in expected]
    for thread in threads:
        thread.start()
    memory = []
    for _ in range(loads):
        llm.load_adapter("other", folder)
        answer = llm.generate(prompt_of(1), adapter="other", max_new_tokens=2)
        llm.unload_adapter("other")
        answer.result()
        memory.append(resident_bytes())
    is_over.set()
    for thread in threads:
        thread.join()
    begin, end = memory[len(memory) // 10], memory[-1]
    print(
        f"{loads} loads under load: {sum(counts.values())} answers, {len(problems)} wrong or failed, memory "
        f"{begin / 2**20:.1f} to {end / 2**20:.1f} MiB after the first tenth",
        flush=True,
    )
    return len(problems)


def step_seconds(llms: dict[str, LLM], tokens: int = 200, rounds: int = 9) -> dict[str, float]:
    """Return the median time of a step with one answer, by turns."""
    times: dict[str, list[float]] = {name: [] for name in llms}
    for _ in range(rounds):
        for name, llm in llms.items():
            adapter = "0" if name.startswith("an adapter") else None
            options = {"max_new_tokens": tokens, "ignore_eos": True, "adapter": adapter, "draft": 0}
            metrics = llm.generate(prompt_of(0), **options).result().metrics
            times[name].append(metrics.generation_seconds / (tokens - 1))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=(*DTYPES, "int4", "int8"), default="float32")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--loads", type=int, default=1000)
    parser.add_argument("--times", action="store_true", help="only measure steps")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint")
    options = parser.parse_args()
    global checkpoint
    checkpoint = options.model
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        folders = [write_adapter(base / str(number), number) for number in range(ROWS)]
        path = export(base / "adapters.pte", options.format, adapters=ROWS, lora_rank=RANK)
        with LLM.load(path) as llm:
            begin = time.monotonic()
            for number, folder in enumerate(folders):
                llm.load_adapter(str(number), folder)
            print(f"{(time.monotonic() - begin) / ROWS * 1e3:.1f} ms to load an adapter")
            wrong = 0
            if not options.times:
                wrong = check_batches(llm, folders, options.tokens, options.format)
                wrong += check_loads(llm, folders[-1], options.loads)
            with LLM.load(export(base / "plain.pte", options.format)) as plain:
                llms = {"no adapter, program without": plain, "no adapter, program with": llm, "an adapter": llm}
                for kind, seconds in step_seconds(llms).items():
                    print(f"{kind}: {seconds * 1e6:.0f} us per step")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
