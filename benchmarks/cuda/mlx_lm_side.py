"""Measures mlx-lm on a shape. run.py runs this file in a process of its own. Prints JSON: measurement → tokens/s."""

import importlib
import json
import sys
import time

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler
from shapes import GROUP_SIZE, SHAPES, bits_of

CONTEXTS, PREFILLS, STEPS, REPEATS = (128, 2048), (512, 2048), 100, 6
WARM_UP = 11  # tokens that are not timed


def load(shape: str) -> nn.Module:
    """Return the model of mlx-lm of a shape, with random weights in bfloat16, or quantized."""
    config = SHAPES[shape]
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)

    def format_of(path, module):
        is_end = path.endswith(("embed_tokens", "lm_head"))
        return hasattr(module, "to_quantized") and {"group_size": GROUP_SIZE, "bits": 8 if is_end else bits_of(shape)}

    if bits_of(shape) < 16:
        nn.quantize(model, class_predicate=format_of)
    mx.eval(model.parameters())
    return model


def main() -> None:
    model = load(sys.argv[1])
    prompt = mx.random.randint(0, SHAPES[sys.argv[1]]["vocab_size"], (max(*CONTEXTS, *PREFILLS),))
    samplers = {"greedy": make_sampler(temp=0.0), "sampled": make_sampler(temp=0.8, top_p=0.9, top_k=40)}

    def prefill(length):
        begin = time.perf_counter()
        next(generate_step(prompt[:length], model, max_tokens=1, sampler=samplers["sampled"]))
        return time.perf_counter() - begin

    result = {}
    for length in PREFILLS:
        prefill(length)
        result[f"prefill {length}"] = length / min(prefill(length) for _ in range(REPEATS))
    for length in CONTEXTS:
        for kind, sampler in samplers.items():
            speeds = []
            for _ in range(REPEATS):
                steps = generate_step(prompt[:length], model, max_tokens=STEPS, sampler=sampler)
                ends = [time.perf_counter() for _ in steps]
                speeds.append((len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1]))
            result[f"decode at {length}, {kind}"] = max(speeds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
