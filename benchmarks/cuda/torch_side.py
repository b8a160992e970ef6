"""Measures PyTorch: the model of transformers with a static cache, compiled, with CUDA graphs. Prints JSON."""

import json
import sys
import time

import torch
from shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

CONTEXTS, STEPS, REPEATS, CAPACITY = (128, 2048), 100, 6, 4096
WARM_UP = 10  # steps that are not timed


def draw(logits):
    """Draw tokens `[B, 1]` with temperature 0.8, top_k 40 and top_p 0.9."""
    values, tokens = torch.topk(logits[:, -1].float() / 0.8, 40)
    p = torch.softmax(values, -1)
    p = torch.where(p.cumsum(-1) - p < 0.9, p, 0)
    return tokens.gather(-1, torch.argmax(p / torch.empty_like(p).exponential_(1), -1, keepdim=True))


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        config = AutoConfig.for_model(**SHAPES[sys.argv[1]], dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config).eval()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(token, position, cache, sampled: bool):
        logits = model(token, cache_position=position, position_ids=position[None], past_key_values=cache).logits
        return draw(logits) if sampled else logits[:, -1:].argmax(-1)

    result = {}
    with torch.inference_mode():
        for length in CONTEXTS:
            cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
            prompt = torch.randint(0, config.vocab_size, (1, length), device="cuda")
            positions = torch.arange(length, device="cuda")
            model(prompt, cache_position=positions, position_ids=positions[None], past_key_values=cache)
            for kind in ("greedy", "sampled"):
                speeds = []
                for _ in range(REPEATS):
                    token = prompt[:, -1:].clone()
                    position = torch.tensor([length], device="cuda")
                    for i in range(STEPS):
                        if i == WARM_UP:
                            torch.cuda.synchronize()
                            begin = time.perf_counter()
                        token = step(token, position, cache, kind == "sampled").clone()
                        position = position + 1
                    torch.cuda.synchronize()
                    speeds.append((STEPS - WARM_UP) / (time.perf_counter() - begin))
                result[f"decode at {length}, {kind}"] = max(speeds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
