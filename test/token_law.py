"""Checks the token law: the tokens of a request depend on the model, the prompt, the parameters and the seed only.

    python test/token_law.py                          # 10,000 tokens in each of 48 settings: more than half an hour
    python test/token_law.py --model wide --tokens 1000
    python test/token_law.py --tokens 2000 --format int4 --rows 1 4

The same mixed requests are answered in several settings. In the first setting, every request has the engine for itself:
one row, the largest chunk, no reuse of prompts and no draft tokens. In the other settings, requests with random arrival
times share 1, 2, 4 or 8 rows. Some of these settings cut prompts into smaller chunks, reuse the KV caches of earlier
prompts, overlap steps, or take draft tokens from n-grams or from a draft model. Between the requests, copies of them
are cancelled, dropped or fail. For each setting, the script prints how many tokens differ from those of the first
setting, in the token or in its log probability. It exits with 1 if a token differs.

The models have random weights, with the shapes of a language model, so that they run the same kernels. "small" takes
little time, "wide" has the large matrix products, "windowed" has ring buffers as KV caches, and "states" has layers
with the gated delta rule. The draft model is the same model in the other format, so that some of its draft tokens are
wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

VOCABULARY = 2048
CONTEXT = 1024
FORMATS = ("float32", "int4")
CPU_CHUNK = 512  # the largest chunk on a CPU
MODELS = {  # hidden_size, intermediate_size, layers, heads, key heads, head size, sliding window
    "small": (128, 384, 2, 4, 2, 32, 0),
    "wide": (768, 2048, 4, 12, 4, 64, 0),
    "windowed": (128, 384, 2, 4, 2, 32, 48),
    "states": (128, 384, 2, 4, 2, 32, 0),
}
REQUEST_KINDS = ("greedy", "filters", "min_p", "unfiltered", "penalties", "mask", "repeat", "bias", "logprobs")


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
    chunk: int = 0  # 0: the largest
    warm: bool = False  # whether prompts reuse KV caches of earlier prompts
    draft: int = 0  # number of draft tokens; 0: none, -1: the engine chooses
    has_draft_model: bool = False  # whether draft tokens come from a draft model instead of n-grams
    overlaps: bool = False  # whether a step is submitted before the tokens of the previous one are read

    def __str__(self) -> str:
        cache, drafts = "warm" if self.warm else "cold", "model" if self.has_draft_model else "n-grams"
        drafts = f"{drafts} {self.draft if self.draft > 0 else ''}".strip() if self.draft else "none"
        text = f"{self.rows} rows, {self.in_flight} at once, chunk {self.chunk or CPU_CHUNK}, {cache}, drafts: {drafts}"
        return text + ", overlapped" * self.overlaps


ALONE = Setting(rows=1, in_flight=1)


def settings(rows: Sequence[int]) -> Iterator[Setting]:
    """The settings that are compared with `ALONE`, for programs with these numbers of rows."""
    for count in rows:
        yield Setting(count, 2 * count, overlaps=True)
        yield Setting(count, 2 * count, chunk=64, warm=True)
        yield Setting(count, 2 * count, chunk=16, warm=True, draft=-1)
        yield Setting(count, count, chunk=16, draft=4)
        yield Setting(count, 2 * count, chunk=64, warm=True, draft=3, has_draft_model=True)
        yield Setting(count, count, warm=True, draft=-1, has_draft_model=True)


# Requests -----------------------------------------------------------------------------


def make_requests(tokens: int, seed: int) -> list[Request]:
    """Return requests whose answers have about `tokens` tokens together. A third begin like an earlier prompt."""
    draw = random.Random(seed)
    requests: list[Request] = []
    total = 0
    while total < tokens:
        length = draw.randint(1, 180) if draw.random() < 0.95 else draw.randint(500, 700)
        prompt = [draw.randrange(VOCABULARY) for _ in range(length)]
        if requests and draw.random() < 1 / 3:
            shared = draw.choice(requests).prompt
            prompt = shared[: draw.randint(1, len(shared))] + prompt[: 1 + length // 4]
        prompt, kind, count = prompt[:750], REQUEST_KINDS[len(requests) % len(REQUEST_KINDS)], draw.randint(10, 120)
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
        "logprobs": sampled | {"allowed_tokens": _repeat(prompt, draw.randrange(VOCABULARY)), "logprobs": 2},
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
    """Return a function `allowed_tokens` that makes the answer repeat the prompt.

    At every eighth token of the answer, it also allows `other`.
    """
    from executorch_mlx.llm.scoring import allow_only

    def allowed(answer: Sequence[int]) -> Any:
        next_token = prompt[len(answer) % len(prompt)]
        return allow_only(VOCABULARY, [next_token, other] if len(answer) % 8 == 7 else [next_token])

    return allowed


# Programs -----------------------------------------------------------------------------


def export(path: Path, model: str, rows: int, format: str) -> None:
    """Export `model`, one of `MODELS`, for `rows` rows in `format`, one of `FORMATS`."""
    import torch
    import transformers as hf
    from executorch_mlx.llm.export import HeadConfig, export_llm

    torch.manual_seed(0)
    hidden, intermediate, layers, heads, key_heads, size, window = MODELS[model]
    config_class, model_class, changes = hf.Qwen3Config, hf.Qwen3ForCausalLM, {}
    if model == "states":
        config_class, model_class = hf.Qwen3_5TextConfig, hf.Qwen3_5ForCausalLM
        changes = {"layer_types": ["linear_attention", "full_attention"]}
        changes |= {"linear_num_key_heads": key_heads, "linear_num_value_heads": heads}
        changes |= {"linear_key_head_dim": size, "linear_value_head_dim": size}
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        **changes,
    )
    head = HeadConfig(penalties=64, logit_bias=8, allowed_tokens=True, logprobs=2)
    export_llm(
        model_class(config).eval(),
        batch=rows,
        head=head,
        quantize=format if format != "float32" else "none",
        sliding_window=window or "auto",
        verify=False,
    ).save(path)


# Answers ------------------------------------------------------------------------------


@dataclass
class Answers:
    """The answers to all requests, in the order of the requests, and counts of the engine."""

    tokens: list[list[tuple]]  # (id, log probability, most likely tokens) for each token of each answer
    seconds: float
    reused: int = 0  # prompt tokens that were in a KV cache
    accepted: int = 0  # draft tokens that were accepted


@dataclass
class Running:
    """A request that is being answered."""

    index: int
    generation: Any
    tokens: list[tuple] = field(default_factory=list)


class Failure(Exception):
    """The exception of a request that fails on purpose."""


def disturb(llm: Any, request: Request, setting: Setting, draw: random.Random) -> None:
    """Run a copy of `request` that ends early: it fails, or it is dropped. Other answers must not change."""
    count, options = draw.randint(0, 6), dict(request.options)

    def fail(answer: Sequence[int]) -> None:
        if len(answer) >= count:
            raise Failure

    if draw.random() < 1 / 2:
        options["allowed_tokens"] = fail
    generation = llm.generate(request.prompt, draft=setting.draft, **options)
    with suppress(Failure):
        for _ in zip(range(count), generation):
            pass


def answer(path: Path, draft: Path | None, setting: Setting, requests: Sequence[Request], seed: int) -> Answers:
    """Answer all requests, started in random order and at random times. `draft` is the draft model."""
    from executorch_mlx import LLM

    draw = random.Random(seed)
    order = list(range(len(requests)))
    if setting.in_flight > 1:
        draw.shuffle(order)
    tokens: list[list[tuple]] = [[] for _ in requests]
    running: list[Running] = []
    begin = time.perf_counter()
    load = {"chunk": setting.chunk, "reuse_prompts": setting.warm, "overlap": setting.overlaps}
    with LLM.load(path, draft=draft, **load) as llm:
        while order or running:
            if setting != ALONE and draw.random() < 0.02:
                disturb(llm, draw.choice(requests), setting, draw)
            if order and (not running or (len(running) < setting.in_flight and draw.random() < 0.3)):
                index = order.pop()
                request = requests[index]
                generation = llm.generate(request.prompt, draft=setting.draft, **request.options)
                running.append(Running(index, generation))
            chosen = draw.choice(running)
            token = next(chosen.generation, None)
            if token is not None:
                chosen.tokens.append((token.id, token.logprob, token.top_logprobs))
            else:
                tokens[chosen.index] = chosen.tokens
                running.remove(chosen)
        stats = llm.stats
    return Answers(tokens, time.perf_counter() - begin, stats.reused_tokens, stats.accepted_tokens)


def differences(a: Sequence[Sequence[tuple]], b: Sequence[Sequence[tuple]]) -> int:
    """Return the number of tokens that differ in the token or in its log probabilities."""
    return sum(x != y for one, other in zip(a, b, strict=True) for x, y in zip_longest(one, other))


def check(folder: Path, model: str, format: str, rows: Sequence[int], tokens: int, seed: int) -> int:
    """Print a table for `model` in `format`, and return the number of tokens that differ."""
    requests = make_requests(tokens, seed)
    alone = answer(program(folder, model, format, 1), None, ALONE, requests, seed)
    count = sum(map(len, alone.tokens))
    print(f"{model}, {format}: {len(requests)} requests, {count} tokens; {ALONE}: {alone.seconds:.0f} s", flush=True)
    total = 0
    for index, setting in enumerate(settings(rows)):
        path = program(folder, model, format, setting.rows)
        other_format = FORMATS[1 - FORMATS.index(format)]
        draft = program(folder, model, other_format, max(rows)) if setting.has_draft_model else None
        other = answer(path, draft, setting, requests, seed + index + 1)
        different = differences(alone.tokens, other.tokens)
        print(
            f"  {setting}: {different} tokens differ; {other.reused} prompt tokens reused, "
            f"{other.accepted} drafts accepted, {other.seconds:.0f} s",
            flush=True,
        )
        total += different
    return total


def program(folder: Path, model: str, format: str, rows: int) -> Path:
    """The program in `folder`, exported if it does not exist."""
    path = folder / f"law-{model}-{format}-{rows}.pte"
    if not path.exists():
        export(path, model, rows, format)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens of all answers in one setting")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--format", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where programs are kept (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        total = sum(
            check(folder, options.model, format, options.rows, options.tokens, options.seed)
            for format in options.format
        )
    print(f"{total} differences")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
