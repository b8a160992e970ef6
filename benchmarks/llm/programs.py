"""Measures an ExecuTorch program, for the worker xnnpack.py of benchmarks/llm.py."""

import statistics

import torch
from process import resident


def measured(steps, prompt: torch.Tensor, options) -> dict[str, dict[int, float]]:
    """Return the median seconds of a prefill and of a decode step, and the resident bytes, by length.

    `options.prefill` has the lengths of the prefills, and `options.context` those of the prompts before the decode
    steps. `steps.fill(prompt)` and `steps.call(tokens, position)` return a token and the seconds of the call.
    """
    steps.fill(prompt[:, :2])  # warm up
    result = {"prefill": {}, "decode": {}, "resident": {}}
    for length in options.prefill:
        spent = [steps.fill(prompt[:, :length])[1] for _ in range(options.repeats)]
        result["prefill"][length] = statistics.median(spent)
    for length in options.context:
        token, _ = steps.fill(prompt[:, :length])
        times = []
        for index in range(options.steps):
            token, spent = steps.call(torch.tensor([[token]]), length + index)
            times.append(spent)
        result["decode"][length] = statistics.median(times[1:])
        result["resident"][length] = resident()
    return result
