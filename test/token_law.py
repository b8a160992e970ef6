"""Checks the token law: the tokens of a request depend on the model, the prompt, the parameters and the seed only.

    python test/token_law.py                          # 100,000 tokens in every setting, about two hours
    python test/token_law.py --tokens 2000 --format int4 --rows 1 4

The same mixed requests are answered in several settings. In the first, every request has the engine for itself: one
row, the largest chunk, no reuse of prompts and no speculation. In the others, requests with random arrival times share
2, 4 or 8 rows, prompts are cut into smaller chunks, and rows are warm and answers speculate, or not. The script prints
how many answers differ from those of the first setting, and exits with 1 if any does.

The model is small and has random weights. Its shapes are those of a language model, so that it runs the same kernels.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 2048
CONTEXT = 512
FORMATS = ("float32", "int4")
KINDS = ("greedy", "filters", "min_p", "unfiltered", "penalties", "mask", "repeat", "bias")


@dataclass(frozen=True)
class Request:
    """A prompt and the arguments of `LLM.generate`."""

    prompt: list[int]
    options: dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """How the engine runs the requests: `in_flight` is the number of requests at once."""

    rows: int
    in_flight: int
    chunk: int = 0
    warm: bool = False
    draft: int = 0

    def __str__(self) -> str:
        cache, speculation = "warm" if self.warm else "cold", "on" if self.draft else "off"
        return f"{self.rows} rows, {self.in_flight} at once, chunk {self.chunk or 512}, {cache}, speculation {speculation}"


ALONE = Setting(rows=1, in_flight=1)


def settings(rows: Sequence[int]) -> Iterator[Setting]:
    """The settings that are compared with `ALONE`, for programs with these numbers of rows."""
    for count in rows:
        yield Setting(count, 2 * count)
        yield Setting(count, 2 * count, chunk=64, warm=True)
        yield Setting(count, 2 * count, chunk=16, warm=True, draft=-1)
        yield Setting(count, count, chunk=16, draft=4)


# Requests -----------------------------------------------------------------------------


def make_requests(tokens: int, seed: int) -> list[Request]:
    """Return requests whose answers have about `tokens` tokens together. A third begin like an earlier prompt."""
    draw = random.Random(seed)
    requests: list[Request] = []
    total = 0
    while total < tokens:
        length = draw.randint(1, 180)
        prompt = [draw.randrange(VOCABULARY) for _ in range(length)]
        if requests and draw.random() < 1 / 3:
            shared = draw.choice(requests).prompt
            prompt = shared[: draw.randint(1, len(shared))] + prompt[: 1 + length // 4]
        prompt, kind, count = prompt[:300], KINDS[len(requests) % len(KINDS)], draw.randint(10, 120)
        if kind == "repeat":
            prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(8, 20))] * 3
        requests.append(Request(prompt, _options(draw, kind, count, prompt)))
        total += count
    return requests


def _options(draw: random.Random, kind: str, count: int, prompt: list[int]) -> dict[str, Any]:
    sampled = {"temperature": 0.8, "seed": draw.randrange(2**63)}
    options = {
        "greedy": {},
        "filters": sampled | {"top_k": draw.choice([5, 40, 200]), "top_p": draw.choice([0.5, 0.9, 1.0])},
        "min_p": sampled | {"temperature": 1.3, "min_p": 0.05},
        "unfiltered": sampled,
        "penalties": sampled | {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        "mask": sampled | {"allowed_tokens": _mask_of(draw.randrange(2**31)), "top_k": 20},
        "repeat": sampled | {"allowed_tokens": _repeat(prompt, draw.randrange(VOCABULARY))},
        "bias": {"logit_bias": {draw.randrange(VOCABULARY): draw.uniform(-3, 3) for _ in range(8)}},
    }[kind]
    return options | {"max_new_tokens": count, "ignore_eos": True}


def _mask_of(key: int) -> Callable[[Sequence[int]], Any]:
    """Return a function `allowed_tokens` that allows a part of the vocabulary, which depends on the last token."""
    import numpy as np

    def allowed(answer: Sequence[int]) -> Any:
        last = answer[-1] if len(answer) else 0
        words = np.random.default_rng([key, last]).integers(-(2**31), 2**31, VOCABULARY // 32, dtype=np.int64)
        return words.astype(np.int32)

    return allowed


def _repeat(prompt: list[int], other: int) -> Callable[[Sequence[int]], Any]:
    """Return a function `allowed_tokens` that allows the next token of a prompt that repeats itself, and `other`."""
    from executorch_mlx.llm.scoring import allow_only

    def allowed(answer: Sequence[int]) -> Any:
        next_token = prompt[len(answer) % len(prompt)]
        return allow_only(VOCABULARY, [next_token, other] if len(answer) % 8 == 7 else [next_token])

    return allowed


# Programs -----------------------------------------------------------------------------


def export(path: Path, rows: int, form: str) -> None:
    """Export the model for `rows` rows in `form`, one of `FORMATS`."""
    import torch
    from executorch_mlx.llm.export import HeadConfig, export_llm
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, initializer_range=0.15,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    head = HeadConfig(penalties=64, logit_bias=8, allowed_tokens=True)
    quantize = form if form != "float32" else "none"
    export_llm(model, batch=rows, head=head, quantize=quantize, verify=False).save(path)


# Answers ------------------------------------------------------------------------------


@dataclass
class Answers:
    """The token ids of the answers in the order of the requests, and what the engine counted."""

    tokens: list[list[int]]
    seconds: float
    reused: int = 0
    accepted: int = 0


@dataclass
class Running:
    """A request that is being answered."""

    index: int
    generation: Any
    tokens: list[int] = field(default_factory=list)


def answer(path: Path, setting: Setting, requests: Sequence[Request], seed: int) -> Answers:
    """Answer all requests, started in random order and at random times."""
    from executorch_mlx import LLM

    draw = random.Random(seed)
    order = list(range(len(requests)))
    if setting.in_flight > 1:
        draw.shuffle(order)
    tokens: list[list[int]] = [[] for _ in requests]
    running: list[Running] = []
    begin = time.perf_counter()
    with LLM.load(path, chunk=setting.chunk, reuse_prompts=setting.warm) as llm:
        while order or running:
            if order and (not running or (len(running) < setting.in_flight and draw.random() < 0.3)):
                index = order.pop()
                request = requests[index]
                generation = llm.generate(request.prompt, draft=setting.draft, **request.options)
                running.append(Running(index, generation))
            chosen = draw.choice(running)
            token = next(chosen.generation, None)
            if token is not None:
                chosen.tokens.append(token.id)
            else:
                tokens[chosen.index] = chosen.tokens
                running.remove(chosen)
        stats = llm.stats
    return Answers(tokens, time.perf_counter() - begin, stats.reused_tokens, stats.accepted_tokens)


def differences(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> int:
    """Return the number of answers that differ."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def check(folder: Path, form: str, rows: Sequence[int], tokens: int, seed: int) -> int:
    """Print a table for `form`, and return the number of answers that differ."""
    requests = make_requests(tokens, seed)
    for count in sorted({1, *rows}):
        if not program(folder, form, count).exists():
            export(program(folder, form, count), count, form)
    alone = answer(program(folder, form, 1), ALONE, requests, seed)
    count = sum(map(len, alone.tokens))
    print(f"{form}: {len(requests)} requests, {count} tokens; {ALONE}: {alone.seconds:.0f} s", flush=True)
    total = 0
    for index, setting in enumerate(settings(rows)):
        other = answer(program(folder, form, setting.rows), setting, requests, seed + index + 1)
        different = differences(alone.tokens, other.tokens)
        print(
            f"  {setting}: {different} answers differ; {other.reused} prompt tokens reused, "
            f"{other.accepted} drafts accepted, {other.seconds:.0f} s",
            flush=True,
        )
        total += different
    return total


def program(folder: Path, form: str, rows: int) -> Path:
    return folder / f"law-{form}-{rows}.pte"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of all answers in one setting")
    parser.add_argument("--format", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where programs are kept (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        total = sum(check(folder, form, options.rows, options.tokens, options.seed) for form in options.format)
    print(f"{total} differences")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
