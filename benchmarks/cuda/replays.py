"""Compares the answers of a program with and without replays of its steps, on an NVIDIA GPU.

    python benchmarks/cuda/replays.py PROGRAM.pte [TOKENS]

Each case runs alone. Then all cases run at once, with requests that begin while others run and end before them. Then
follow prompts of a few lengths with other tokens each time. The head of the program is that of the commands: export.py
--head. Prints the times of the cases alone, in steps per second, those of the last prompts, and fails if a token or a
log probability differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
BIAS = {"logit_bias": {5: 3.0, 11: -2.0}}
CASES = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "without filters": {"temperature": 1.0, "seed": 3},
    "penalties": PENALTIES,
    "sampled with penalties and biases": SAMPLED | PENALTIES | BIAS,
    "masks": SAMPLED,
    "log probabilities": {"logprobs": 3},
    "sampled with log probabilities and penalties": SAMPLED | PENALTIES | {"logprobs": 20},
}


PROMPTS = (16, 100, 512, 100, 2048)  # lengths; one of them occurs twice
ROUNDS = 6


def answers(program: str, count: int) -> None:
    """Print the answers and the steps per second of the cases, as JSON."""
    import numpy as np
    from executorch_mlx import LLM

    llm = LLM.load(program, reuse_prompts=False)
    words = -(-llm.program.vocab_size // 32)

    def mask(tokens):  # another one in each step
        return np.full(words, 0x11111111 << len(tokens) % 4, np.uint32).view(np.int32)

    def start(number, name, tokens):
        prompt = [(17 * i + 29 * number) % llm.program.vocab_size for i in range(3 + 31 * number)]
        options = CASES[name] | {"allowed_tokens": mask if name == "masks" else None}
        return llm.generate(prompt, max_new_tokens=tokens, ignore_eos=True, draft=0, **options)

    def shown(answer):
        return [[token.id, token.logprob, token.top_logprobs] for token in answer]

    found, speeds = {}, {}
    for number, name in enumerate(CASES):
        shown(start(number, name, 8))
        begin = time.perf_counter()
        found[name] = shown(start(number, name, count))
        speeds[name] = count / (time.perf_counter() - begin)
    together = [start(number, name, count // 2 + 9 * number) for number, name in enumerate(CASES)]
    late = []
    for number, name in enumerate(CASES):
        late.append(start(number + 3, name, count // 4))
        time.sleep(0.02)
    found["together"] = [shown(answer) for answer in together + late]
    found["prompts"], prompts = [], {}
    for turn in range(ROUNDS):
        for length in PROMPTS:
            prompt = [(17 * i + 29 * turn + length) % llm.program.vocab_size for i in range(length)]
            answer = llm.generate(prompt, max_new_tokens=8, ignore_eos=True, draft=0, logprobs=3)
            found["prompts"].append(shown(answer))
            prompts[length] = 1e3 * answer.result().metrics.prompt_seconds
    print(json.dumps({"found": found, "speeds": speeds, "prompts": prompts}))


def main() -> None:
    if sys.argv[1] == "--side":
        return answers(sys.argv[2], int(sys.argv[3]))
    program, count = sys.argv[1], (sys.argv[2:] or ["200"])[0]
    results = {}
    for arm in ("on", "off"):
        environment = os.environ | ({"EXECUTORCH_MLX_KERNELS": "replay=off"} if arm == "off" else {})
        command = [sys.executable, __file__, "--side", program, count]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{arm}: failed\n{done.stderr[-3000:]}")
        print("".join(f"{arm}: {line}\n" for line in done.stderr.splitlines() if "replay" in line), end="")
        results[arm] = json.loads(done.stdout.splitlines()[-1])
    on, off = results["on"], results["off"]
    different = [name for name in on["found"] if on["found"][name] != off["found"][name]]
    for name, speed in on["speeds"].items():
        print(f"{name:48}{speed:9.1f} steps/s, without replays {off['speeds'][name]:9.1f}")
    for length, milliseconds in on["prompts"].items():
        print(f"prompt of {length:>5} tokens:{milliseconds:9.2f} ms, without replays {off['prompts'][length]:9.2f}")
    print(f"{len(on['found'])} cases, different: {different}")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
